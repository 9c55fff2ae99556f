"""Spectral normalization by parametrization in the discriminator, hinge loss."""
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(56)
disc = nn.Sequential(spectral_norm(nn.Linear(2, 12)), nn.LeakyReLU(0.1), spectral_norm(nn.Linear(12, 1)))
gen = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2))
opts = [torch.optim.Adam(m.parameters(), lr=4e-3) for m in (disc, gen)]
for step in range(5):
    real = torch.randn(10, 2).abs()
    with torch.no_grad():
        fake = gen(torch.randn(10, 3))
    d_loss = torch.relu(1 - disc(real)).mean() + torch.relu(1 + disc(fake)).mean()
    opts[0].zero_grad()
    d_loss.backward()
    opts[0].step()
    g_loss = -disc(gen(torch.randn(10, 3))).mean()
    opts[1].zero_grad()
    g_loss.backward()
    opts[1].step()
    print(step, d_loss.item().hex(), g_loss.item().hex())
