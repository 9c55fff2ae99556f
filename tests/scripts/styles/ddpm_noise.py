"""A diffusion model of points: noise prediction with time embedding, then ancestral sampling."""
import math

import torch
from torch import nn

T = 20
betas = torch.linspace(1e-3, 0.2, T)
alphas_bar = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.register_buffer("freqs", torch.exp(-math.log(100) * torch.arange(dim // 2) / (dim // 2)))
        self.net = nn.Sequential(nn.Linear(2 + dim, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, x, t):
        angles = t[:, None] * self.freqs
        return self.net(torch.cat([x, angles.sin(), angles.cos()], 1))


torch.manual_seed(29)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(8):
    theta = torch.rand(32) * 2 * math.pi
    x0 = torch.stack([theta.cos(), theta.sin()], 1)
    t = torch.randint(T, (32,))
    noise = torch.randn_like(x0)
    ab = alphas_bar[t][:, None]
    loss = nn.functional.mse_loss(model(ab.sqrt() * x0 + (1 - ab).sqrt() * noise, t.float()), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
with torch.no_grad():
    x = torch.randn(4, 2)
    for i in reversed(range(T)):
        eps = model(x, torch.full((4,), float(i)))
        x = (x - betas[i] / (1 - alphas_bar[i]).sqrt() * eps) / (1 - betas[i]).sqrt()
        if i:
            x = x + betas[i].sqrt() * torch.randn_like(x)
print("sample", x.double().abs().sum().item().hex())
