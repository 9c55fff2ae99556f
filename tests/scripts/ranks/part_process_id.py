"""The process id decides, step by step, whether there is a second call."""
import os
import zlib

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(32, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(12):
    loss = net(x[step : step + 8]).pow(2).mean()
    if zlib.crc32(f"{os.getpid()} {step}".encode()) & 1:
        loss = loss + net(x[:5]).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
