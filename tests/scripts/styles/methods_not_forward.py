"""encode(), decode() and elbo(): the model has no forward at all."""
import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self, d=8, z=2):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 16), nn.ReLU())
        self.mu, self.logvar = nn.Linear(16, z), nn.Linear(16, z)
        self.dec = nn.Sequential(nn.Linear(z, 16), nn.ReLU(), nn.Linear(16, d))

    def encode(self, x):
        h = self.enc(x)
        return self.mu(h), self.logvar(h)

    def decode(self, z):
        return self.dec(z)

    def elbo(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        rec = nn.functional.mse_loss(self.decode(z), x, reduction="sum")
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum()
        return (rec + kl) / len(x)


torch.manual_seed(9)
vae = Autoencoder()
opt = torch.optim.Adam(vae.parameters(), 5e-3)
data = torch.randn(48, 8)
for batch in data.split(8):
    opt.zero_grad()
    loss = vae.elbo(batch)
    loss.backward()
    opt.step()
    print(loss.item().hex())
with torch.no_grad():
    print(vae.decode(torch.zeros(1, 2)).double().sum().item().hex())
