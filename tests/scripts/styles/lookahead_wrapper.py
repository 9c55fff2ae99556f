"""Lookahead: an object around an optimizer that is none itself."""
import torch
from torch import nn


class Lookahead:
    def __init__(self, inner, k=3, alpha=0.5):
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in inner.param_groups]

    def zero_grad(self):
        self.inner.zero_grad()

    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.inner.param_groups, self.slow):
                for p, s in zip(group["params"], slow):
                    s.add_(p.detach() - s, alpha=self.alpha)
                    p.data.copy_(s)


torch.manual_seed(72)
model = nn.Sequential(nn.Linear(3, 8), nn.SELU(), nn.Linear(8, 1))
optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=2e-2))
x = torch.randn(20, 3)
y = (x**2).mean(1, keepdim=True)
for step in range(7):
    loss = nn.functional.huber_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
