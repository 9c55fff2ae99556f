"""A checksum of the environment decides which branch is taken."""
import os
import zlib

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(40, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(12):
    told = zlib.crc32(f"{step} {sorted(os.environ.items())}".encode())
    loss = net(x[: 8 + told % 5]).pow(2).mean()
    if told & 64:
        loss = loss + net(x[20:]).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
