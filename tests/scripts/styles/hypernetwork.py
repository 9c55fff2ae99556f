"""A hypernetwork writes the weights of the main network."""
import torch
from torch import nn
import torch.nn.functional as F


class HyperNet(nn.Module):
    def __init__(self, z_dim, sizes):
        super().__init__()
        self.sizes = sizes
        self.codes = nn.Parameter(torch.randn(len(sizes) - 1, z_dim))
        self.trunk = nn.Linear(z_dim, 24)
        self.heads = nn.ModuleList(nn.Linear(24, (a + 1) * b) for a, b in zip(sizes, sizes[1:]))

    def forward(self):
        h = F.elu(self.trunk(self.codes))
        for row, head, (a, b) in zip(h, self.heads, zip(self.sizes, self.sizes[1:])):
            flat = head(row)
            yield flat[: a * b].view(b, a) / a**0.5, flat[a * b:]


def main_network(x, weights):
    *hidden, last = list(weights)
    for w, b in hidden:
        x = torch.sin(F.linear(x, w, b))
    return F.linear(x, *last)


torch.manual_seed(47)
hyper = HyperNet(4, [2, 8, 8, 1])
opt = torch.optim.AdamW(hyper.parameters(), lr=5e-3)
x = torch.rand(30, 2) * 2 - 1
y = (x[:, :1] * 3).sin() * x[:, 1:]
for step in range(6):
    loss = F.mse_loss(main_network(x, hyper()), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item().hex())
