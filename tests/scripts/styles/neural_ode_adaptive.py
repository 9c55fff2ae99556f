"""A neural ODE with an adaptive Bogacki-Shampine solver written out."""
import torch
from torch import nn


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.evaluations = 0

    def forward(self, t, y):
        self.evaluations += 1
        return self.net(y**3)


def odeint(f, y, t1, rtol=1e-2, h=0.25):
    t = 0.0
    while t < t1 - 1e-9:
        h = min(h, t1 - t)
        k1 = f(t, y)
        k2 = f(t + h / 2, y + h / 2 * k1)
        k3 = f(t + 3 * h / 4, y + 3 * h / 4 * k2)
        new = y + h * (2 * k1 + 3 * k2 + 4 * k3) / 9
        k4 = f(t + h, new)
        error = (h * (-5 * k1 / 72 + k2 / 12 + k3 / 9 - k4 / 8)).abs().max().item()
        if error <= rtol:
            t, y = t + h, new
        h *= min(2.0, max(0.3, 0.9 * (rtol / (error + 1e-12)) ** (1 / 3)))
    return y


torch.manual_seed(33)
field = Field()
optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-2)
y0 = torch.tensor([[2.0, 0.0], [0.0, 1.5], [1.0, 1.0]])
goal = y0 @ torch.tensor([[0.5, -0.8], [0.8, 0.5]])
for step in range(5):
    optimizer.zero_grad()
    loss = (odeint(field, y0, 1.0) - goal).abs().mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
print(field.evaluations > 20)
