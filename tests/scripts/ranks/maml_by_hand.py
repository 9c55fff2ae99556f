"""MAML with fast weights passed into forward, second order, and reads of them behind."""
import torch
import torch.nn.functional as F
from torch import nn


class Sine(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(8, 1)), nn.Parameter(torch.zeros(8))
        self.w2, self.b2 = nn.Parameter(torch.randn(1, 8) * 0.3), nn.Parameter(torch.zeros(1))

    def forward(self, x, weights=None):
        w1, b1, w2, b2 = weights if weights is not None else (self.w1, self.b1, self.w2, self.b2)
        return F.linear(torch.tanh(F.linear(x, w1, b1)), w2, b2)


torch.manual_seed(59)
model = Sine()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(5):
    meta, gains = 0.0, []
    for _ in range(3):
        phase = torch.rand(1)
        x = torch.rand(10, 1) * 4 - 2
        y = torch.sin(x + phase)
        weights = list(model.parameters())
        for _ in range(2):
            inner = F.mse_loss(model(x[:5], weights), y[:5])
            grads = torch.autograd.grad(inner, weights, create_graph=True)
            weights = [w - 0.1 * g for w, g in zip(weights, grads)]
        outer = F.mse_loss(model(x[5:], weights), y[5:])
        with torch.no_grad():
            gains.append((F.mse_loss(model(x[5:]), y[5:]) - outer).item())
        meta = meta + outer / 3
    opt.zero_grad()
    meta.backward()
    opt.step()
    print(f"meta {meta.item():.6g} g {model.w2.grad.norm():.6g} fast {weights[0].norm().item():.6g} gains",
          *(f"{g:.6g}" for g in gains))
torch.save(model.state_dict(), "model.pt")
