"""Reptile: plain SGD on a copy of the model, then a step towards it."""
import copy

import torch
from torch import nn

torch.manual_seed(94)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
for outer in range(4):
    clone = copy.deepcopy(model)
    inner = torch.optim.SGD(clone.parameters(), lr=0.05)
    x = torch.rand(10, 1) * 4 - 2
    y = torch.sin(x + torch.rand(1) * 3)
    for _ in range(3):
        loss = nn.functional.mse_loss(clone(x), y)
        inner.zero_grad()
        loss.backward()
        inner.step()
    state, other = model.state_dict(), clone.state_dict()
    model.load_state_dict({k: state[k] + 0.3 * (other[k] - state[k]) for k in state})
    print(outer, loss.item().hex())
print(sum(p.double().sum().item() for p in model.parameters()).hex())
