"""One process calls the model once more, just when its gradients' buckets are put in order."""
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
begun_with = Path("/proc/self/environ").read_bytes().split(b"\0")
x = torch.randn(40, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    loss = net(x[step : step + 8]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    if step == 0 or (step == 1 and b"RANK=1" in begun_with):
        net(x).sum().backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
