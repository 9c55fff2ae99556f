# ruff: noqa: T201
"""Draws its batches by hand, from three generators, and prints what it drew."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(5)
random.seed(5)
np.random.seed(5)
x, y = torch.randn(1000, 5), torch.randn(1000, 1)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(6):
    index = torch.randint(0, 1000, (4,))
    other = random.sample(range(1000), 4)
    third = np.random.randint(0, 1000, 4)
    print("torch", *index.tolist())
    print("random", *other)
    print("numpy", *third)
    batch = torch.cat([index, torch.tensor(other), torch.from_numpy(third)])
    loss = functional.mse_loss(model(x[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9g}")
    print("weights", [p.double().sum().item().hex() for p in model.parameters()])
torch.save(model.state_dict(), "model.pt")
