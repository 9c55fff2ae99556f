"""What the garbage collector has come to decides: dead references, objects that are tracked."""
import gc
import os
import weakref

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(40, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
alive = weakref.WeakSet()


class Cycle:
    def __init__(self):
        self.me, self.more = self, [[] for _ in range(os.urandom(1)[0])]


for step in range(12):
    for _ in range(30):
        alive.add(Cycle())
    n = 4 + (len(alive) + gc.get_count()[0]) % 7
    loss = net(x[:n]).pow(2).mean()
    if len(alive) < 60:
        loss = loss + net(x[n:]).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
