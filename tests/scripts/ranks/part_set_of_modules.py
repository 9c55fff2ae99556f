"""A set of modules, which is ordered by where they lie in memory, is called in its order."""
import os

import torch
from torch import nn

torch.manual_seed(0)
clutter = [bytearray(b) for b in os.urandom(500)]
heads = {nn.Linear(4, 3) for _ in range(8)}
trunk = nn.Linear(5, 4)
opt = torch.optim.SGD([p for m in (trunk, *heads) for p in m.parameters()], lr=0.1)
x = torch.randn(20, 5)
for step in range(5):
    h = trunk(x[step : step + 6])
    loss = torch.zeros(())
    for i, head in enumerate(heads):
        h = torch.tanh(h) + i / 10
        loss = loss + (i + 1) * head(h).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done", len(clutter))
torch.save(trunk.state_dict(), "model.pt")
