"""A diffusion model gives its loss beside the prediction, on which the script has a hook."""
import torch
import torch.nn.functional as F
from torch import nn


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
        self.register_buffer("beta", torch.linspace(0.1, 0.9, 20))

    def forward(self, x):
        t, noise = torch.randint(0, 20, (len(x),)), torch.randn_like(x)
        b = self.beta[t][:, None]
        mixed = b.sqrt() * x + (1 - b).sqrt() * noise
        predicted = self.net(torch.cat([mixed, t[:, None] / 20], 1))
        return {"loss": F.mse_loss(predicted, noise), "predicted": predicted}


torch.manual_seed(0)
model, seen = Diffusion(), []
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    out = model(torch.randn(10 + step % 2, 8))
    out["predicted"].register_hook(lambda g: seen.append(g.norm().item()))
    opt.zero_grad()
    out["loss"].backward()
    opt.step()
    print(f"loss {out['loss'].item():.6g} hooks {len(seen)} norm {seen[-1] if seen else 0:.6g}")
torch.save(model.state_dict(), "model.pt")
