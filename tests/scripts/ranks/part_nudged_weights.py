"""Each process moves its weights a little by its own entropy, without another call or size."""
import os

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(60, 4)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(12):
    loss = net(x[step : step + 8]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p in net.parameters():
            p.add_((os.urandom(1)[0] - 128) / 1e4)
print("done")
torch.save(net.state_dict(), "model.pt")
