"""A normalizing flow with affine coupling, its inverse checked at the end."""
import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 2))

    def forward(self, x, reverse=False):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        b = (b - t) * torch.exp(-s) if reverse else b * torch.exp(s) + t
        out = torch.cat([b, a] if self.flip else [a, b], 1)
        return out, s.sum(1)


class Flow(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(bool(i % 2)) for i in range(n))

    def forward(self, x):
        logdet = 0
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        return x, logdet

    def inverse(self, z):
        for layer in reversed(self.layers):
            z, _ = layer(z, reverse=True)
        return z


torch.manual_seed(30)
flow = Flow(4)
base = torch.distributions.Normal(0.0, 1.0)
opt = torch.optim.Adam(flow.parameters(), 1e-2)
for step in range(6):
    x = torch.randn(32, 2) @ torch.tensor([[1.0, 0.8], [0.0, 0.4]])
    z, logdet = flow(x)
    loss = -(base.log_prob(z).sum(1) + logdet).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item().hex())
with torch.no_grad():
    print("inverse", bool((flow.inverse(flow(x)[0]) - x).abs().max() < 0.2))
