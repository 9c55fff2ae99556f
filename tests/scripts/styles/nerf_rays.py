"""A radiance field: positional encoding, coarse sampling along rays, volume rendering."""
import torch
from torch import nn


def encode(x, n=3):
    return torch.cat([x] + [f(2.0**i * x) for i in range(n) for f in (torch.sin, torch.cos)], -1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(21, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, points):
        h = self.body(encode(points))
        return torch.relu(self.sigma(h)).squeeze(-1), torch.sigmoid(self.rgb(h))


def render(field, origins, dirs, n=8):
    t = torch.linspace(0.5, 2.5, n) + torch.rand(origins.size(0), n) * 0.25
    sigma, rgb = field(origins[:, None] + t[..., None] * dirs[:, None])
    delta = torch.cat([t[:, 1:] - t[:, :-1], torch.full_like(t[:, :1], 1e10)], 1)
    alpha = 1 - torch.exp(-sigma * delta)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return ((alpha * trans)[..., None] * rgb).sum(1)


torch.manual_seed(48)
field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
for step in range(5):
    dirs = nn.functional.normalize(torch.randn(16, 3), dim=1)
    colors = (dirs > 0).float()
    loss = (render(field, torch.zeros(16, 3), dirs) - colors).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), (-10 * loss.detach().log10()).item().hex())
