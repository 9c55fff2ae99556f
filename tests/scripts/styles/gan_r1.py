"""A GAN with non-saturating loss and R1 penalty on real images."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(25)
G = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 1))
g_opt = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.0, 0.99))
d_opt = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.0, 0.99))
for it in range(6):
    real = torch.randn(16, 2) * 0.5 + 1
    fake = G(torch.randn(16, 4)).detach()
    d_loss = F.softplus(D(fake)).mean() + F.softplus(-D(real)).mean()
    if it % 2 == 0:
        real.requires_grad_()
        (slope,) = torch.autograd.grad(D(real).sum(), real, create_graph=True)
        d_loss = d_loss + 5.0 * slope.square().sum(1).mean()
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()
    g_loss = F.softplus(-D(G(torch.randn(16, 4)))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    print(it, d_loss.item().hex(), g_loss.item().hex())
