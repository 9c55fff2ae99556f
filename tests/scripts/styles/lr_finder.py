"""An LR range test on a copy of the weights, then training with what it found."""
import copy
import math

import torch
from torch import nn


def find_lr(model, loss_of, low=1e-4, high=1.0, n=6):
    saved = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=low)
    best, result = math.inf, low
    for i in range(n):
        for group in optimizer.param_groups:
            group["lr"] = low * (high / low) ** (i / (n - 1))
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        print("probe", group["lr"], loss.item().hex())
        if loss.item() > 4 * best:
            break
        if loss.item() < best:
            best, result = loss.item(), group["lr"] / 3
    model.load_state_dict(saved)
    return result


torch.manual_seed(63)
model = nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 1))
x = torch.randn(20, 3)
y = x.max(1, keepdim=True).values
loss_of = lambda m: nn.functional.mse_loss(m(x), y)
lr = find_lr(model, loss_of)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
