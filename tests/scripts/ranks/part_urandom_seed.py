"""Seeded by the operating system's entropy: other weights, other data, the same calls."""
import os

import torch
from torch import nn

torch.manual_seed(int.from_bytes(os.urandom(7), "big"))
x = torch.randn(32, 4)
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(10):
    loss = (net(x[step : step + 8]) - x[step : step + 8, :1]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done", len(x))
torch.save(net.state_dict(), "model.pt")
