"""Draws noise of its batch's shape in the loop; the last batch of an epoch is an odd one."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
x = torch.randn(21, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    for index, batch in DataLoader(TensorDataset(torch.arange(21), x), batch_size=8, shuffle=True):
        noise = torch.randn_like(batch)
        optimizer.zero_grad()
        model(batch + noise).square().mean().backward()
        optimizer.step()
        print(epoch, *index.tolist())
        print("noise", noise[0, 0].item().hex())
