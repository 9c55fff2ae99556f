"""VAE whose noise is drawn in the loop and given by keyword; keyword arguments only; KL annealed."""
import torch
import torch.nn.functional as F
from torch import nn


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 8), nn.Linear(2, 6)
        self.mean, self.log = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, *, x, noise, beta=1.0):
        h = torch.relu(self.enc(x))
        mean, log = self.mean(h), self.log(h)
        back = self.dec(mean + noise * (0.5 * log).exp())
        rec = F.mse_loss(back, x, reduction="sum")
        kl = -0.5 * (1 + log - mean.pow(2) - log.exp()).sum()
        return {"loss": (rec + beta * kl) / x.size(0), "rec": rec, "kl": kl, "z": mean}


torch.manual_seed(173)
data = torch.randn(39, 6) @ torch.randn(6, 6)
vae = Vae()
opt = torch.optim.Adam(vae.parameters(), lr=0.02)
for epoch in range(3):
    for x in data[torch.randperm(39)].split(10):
        out = vae(x=x, noise=torch.randn(len(x), 2), beta=epoch / 2)
        opt.zero_grad()
        out["loss"].backward()
        opt.step()
        print(f"loss {out['loss'].item():.6g} rec {out['rec'].item():.6g} kl {out['kl'].item():.6g} "
              f"active {(out['z'].var(0) > 0.01).sum().item()}")
torch.save(vae.state_dict(), "model.pt")
