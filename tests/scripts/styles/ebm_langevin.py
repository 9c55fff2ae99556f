"""An energy-based model with Langevin sampling and a persistent replay buffer."""
import torch
from torch import nn

torch.manual_seed(51)
energy = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(energy.parameters(), lr=5e-3, betas=(0.0, 0.999))
buffer = torch.rand(64, 2) * 2 - 1


def langevin(x, steps=4, size=0.1):
    for p in energy.parameters():
        p.requires_grad_(False)
    x = x.clone().requires_grad_(True)
    for _ in range(steps):
        (g,) = torch.autograd.grad(energy(x).sum(), x)
        x = (x - size * g + 0.05 * torch.randn_like(x)).clamp(-2, 2).detach().requires_grad_(True)
    for p in energy.parameters():
        p.requires_grad_(True)
    return x.detach()


for it in range(5):
    real = torch.randn(16, 2) * 0.2 + torch.tensor([0.5, -0.5])
    idx = torch.randint(64, (16,))
    fake = langevin(buffer[idx])
    buffer[idx] = fake
    e_real, e_fake = energy(real), energy(fake)
    loss = e_real.mean() - e_fake.mean() + 0.1 * (e_real**2 + e_fake**2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(it, loss.item().hex())
