"""Whoever makes the lock file first prepares the data; who comes later waits for them."""
import os
import time
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
prepared = Path("data.pt")
try:
    os.close(os.open("lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    mine = True
except FileExistsError:
    mine = False
if mine:
    time.sleep(0.1)
    torch.save(torch.randn(40, 4), "data.tmp")
    os.replace("data.tmp", prepared)
while not prepared.exists():
    time.sleep(0.01)
x = torch.load(prepared)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(8):
    loss = net(x[step : step + 8]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
os.unlink("lock")
