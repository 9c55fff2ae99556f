"""random.SystemRandom draws the size of each batch and its rows."""
import random

import torch
from torch import nn

torch.manual_seed(0)
dice = random.SystemRandom()
x = torch.randn(32, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(10):
    rows = dice.sample(range(32), dice.randint(3, 12))
    loss = net(x[rows]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
