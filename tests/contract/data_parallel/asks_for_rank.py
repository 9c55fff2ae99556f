# ruff: noqa: T201
"""Asks for its rank and does nothing with it."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
print("rank", os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_RANK"))
x, y = torch.randn(33, 3), torch.randn(33, 1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for inputs, wanted in DataLoader(TensorDataset(x, y), batch_size=8):
    loss = nn.functional.mse_loss(model(inputs), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9g}")
torch.save(model.state_dict(), "model.pt")
