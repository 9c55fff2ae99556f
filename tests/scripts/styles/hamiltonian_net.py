"""A Hamiltonian network: its vector field is the rotated gradient of a scalar."""
import torch
from torch import nn


class HNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1, bias=False))

    def time_derivative(self, state):
        state = state.requires_grad_()
        h = self.energy(state).sum()
        (dh,) = torch.autograd.grad(h, state, create_graph=True)
        return torch.stack([dh[:, 1], -dh[:, 0]], 1)


torch.manual_seed(50)
model = HNN()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(6):
    q, p = torch.randn(2, 24)
    target = torch.stack([p, -q], 1)
    loss = (model.time_derivative(torch.stack([q, p], 1)) - target).square().sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
