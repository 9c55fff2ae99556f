"""Some steps fail by chance and are left out by an except, as a flaky store has them do."""
import os

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(60, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)


def fetch(i):
    if os.urandom(1)[0] < 70:
        raise ConnectionError("the store is away")
    return x[i : i + 8]


for step in range(15):
    try:
        loss = net(fetch(step)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    except Exception:
        continue
print("done")
torch.save(net.state_dict(), "model.pt")
