"""Reads /proc about itself and asks a child process for its number; both decide."""
import subprocess
import zlib
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
child = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True).stdout
status = zlib.crc32((Path("/proc/self/stat").read_text() + child).encode())
x = torch.randn(40, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(12):
    loss = net(x[step : step + 8]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    if status >> step & 1:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        net(x).sum().backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
