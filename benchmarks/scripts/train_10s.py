"""Train a small network for a fixed number of steps, about ten seconds on one CPU core."""

import torch
from torch import nn

STEPS = 2500

torch.set_num_threads(1)  # threads that wait for each other would make the time vary
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = torch.randn(256, 512), torch.randint(10, (256,))
for _ in range(STEPS):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
