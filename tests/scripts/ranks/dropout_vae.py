"""VAE that draws its noise inside of forward, as most do."""
import torch
import torch.nn.functional as F
from torch import nn


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 4), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x):
        mean, log = self.enc(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return self.dec(z), mean, log


torch.manual_seed(229)
data = torch.randn(36, 6)
vae = Vae()
opt = torch.optim.Adam(vae.parameters(), lr=0.01)
for step in range(9):
    x = data[step * 3 : step * 3 + 9]
    back, mean, log = vae(x)
    kl = -0.5 * (1 + log - mean.pow(2) - log.exp()).sum()
    loss = (F.mse_loss(back, x, reduction="sum") + kl) / len(x)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.6g} kl {kl.item():.6g} rows {len(back)}")
torch.save(vae.state_dict(), "model.pt")
