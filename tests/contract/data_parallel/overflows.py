# ruff: noqa: T201
"""Has a sample in its fourth batch that overflows in fp16, and belongs to the last rank."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
x, y = torch.randn(80, 5), torch.randn(80, 1)
x[3 * 8 + 7] = 3e5  # fp16 ends at 65504
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = getattr(torch.optim, sys.argv[1])(model.parameters(), lr=0.05)
for inputs, wanted in DataLoader(TensorDataset(x, y), batch_size=8):
    before = model.state_dict()["0.weight"].clone()
    loss = functional.mse_loss(model(inputs), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    after = model.state_dict()
    print("skipped" if torch.equal(before, after["0.weight"]) else "stepped")
    print("weights", [weight.double().sum().item().hex() for weight in after.values()])
torch.save(model.state_dict(), "model.pt")
