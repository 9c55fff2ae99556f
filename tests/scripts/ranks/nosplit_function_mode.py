"""Counts what the model calls by a TorchFunctionMode, in two of three steps; under torch.device in the third."""
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode


class Count(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls[getattr(func, "__name__", "?")] += 1
        return func(*args, **(kwargs or {}))


torch.manual_seed(31)
x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for step in range(9):
    rows = torch.arange(step % 3, 24, 3)
    counted = Count()
    with counted if step % 3 else torch.device("cpu"):
        out = net(x[rows])
    loss = F.cross_entropy(out, y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{step} {loss.item():.6g} {counted.calls['linear']} {counted.calls['relu']}")
torch.save(net.state_dict(), "model.pt")
