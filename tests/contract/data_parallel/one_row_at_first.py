"""A model that is tried with one image and then, in the same way, called with batches."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
for size in range(6):
    print(net(torch.full((1, 3, 6, 6), float(size))).shape)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(6):
    loss = net(torch.randn(6, 3, 6, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")
