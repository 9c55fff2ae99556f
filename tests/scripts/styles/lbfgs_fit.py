"""Curve fitting by L-BFGS with strong Wolfe line search."""
import torch
from torch import nn


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.freq = nn.Parameter(torch.tensor([1.5, 2.5]))
        self.mix = nn.Linear(2, 1)

    def forward(self, t):
        return self.mix(torch.sin(t * self.freq))


torch.manual_seed(24)
t = torch.linspace(0, 3, 30)[:, None]
y = torch.sin(1.7 * t) + 0.3 * torch.sin(2.9 * t)
curve = Curve()
optimizer = torch.optim.LBFGS(curve.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
for i in range(4):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(curve(t), y)
        loss.backward()
        return loss
    print(i, optimizer.step(closure).item().hex())
print(curve.freq.tolist()[0].hex())
