"""numpy.random.default_rng() and secrets, both without a seed, shuffle and choose."""
import secrets

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng()
x = torch.randn(40, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(10):
    rows = torch.from_numpy(rng.permutation(40)[:8])
    loss = net(x[rows] + float(rng.normal())).pow(2).mean()
    if secrets.randbelow(2):
        loss = loss * 2
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
