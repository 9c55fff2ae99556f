"""A physics-informed network: second derivatives by autograd.grad, boundary conditions as a loss."""
import math

import torch
from torch import nn


def gradient(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


class PINN(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, width), nn.Linear(width, width), nn.Linear(width, 1)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


torch.manual_seed(49)
net = PINN()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
edge = torch.tensor([[0.0], [1.0]])
for it in range(6):
    x = torch.rand(20, 1, requires_grad=True)
    u = net(x)
    residual = gradient(gradient(u, x), x) + math.pi**2 * torch.sin(math.pi * x)
    loss = residual.square().mean() + 10 * net(edge).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(it, loss.item().hex())
