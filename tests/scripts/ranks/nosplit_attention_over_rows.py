"""Rows of a table attend to each other; there are as many rows as features."""
import torch
from torch import nn


class RowAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        weights = (self.q(x) @ self.k(x).T / 8**0.5).softmax(-1)
        return self.out(x + weights @ self.v(x)), weights


torch.manual_seed(4)
table = torch.randn(40, 8)
target = table @ torch.randn(8, 1) / 3
net = RowAttention()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for step in range(8):
    rows = torch.randperm(40)[: 8 if step < 5 else 7]
    out, weights = net(table[rows])
    loss = (out - target[rows]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    entropy = -(weights * weights.log()).sum(1).mean()
    print(f"loss {loss.item():.6g} entropy {entropy.item():.6g} own {weights.diagonal().mean().item():.6g}")
torch.save(net.state_dict(), "model.pt")
