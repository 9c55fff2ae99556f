"""A loop that knows nothing of ranks, for data_parallel_overhead.py.

It writes the time of each step's end by the system's monotonic clock, in seconds.
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

steps, path, batch, width = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
data = TensorDataset(torch.randn(batch * 16, width), torch.randint(0, 10, (batch * 16,)))
loader = DataLoader(data, batch_size=batch, shuffle=True)
model = nn.Sequential(
    nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ends = []
while len(ends) < steps:
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.monotonic())
with open(path, "w") as file:  # noqa: PTH123
    file.write("\n".join(map(str, ends)))
print(f"loss {loss.item():.9g}", flush=True)
