"""One process may end in the middle, well, while the other goes on."""
import os
import sys
import zlib

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(60, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(20):
    loss = net(x[step : step + 8]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step > 3 and zlib.crc32(f"{os.getpid()} {step}".encode()) % 3 == 0:
        break
torch.save(net.state_dict(), "model.pt")
print("done")
sys.exit(0)
