"""Parametrizations: weight_norm, orthogonal, and a symmetric one of its own."""
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


torch.manual_seed(57)
model = nn.Sequential(weight_norm(nn.Linear(5, 8)), nn.Tanh(), orthogonal(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))
parametrize.register_parametrization(model[4], "weight", Symmetric())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(12, 5), torch.randn(12, 8)
for step in range(5):
    if step == 3:
        with parametrize.cached():
            loss = nn.functional.mse_loss(model(x), y)
    else:
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
w = model[4].weight
print("symmetric", bool(torch.equal(w, w.T)))
