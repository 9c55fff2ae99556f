"""GAN: real and fake through one discriminator in two calls and in one, noise drawn in the loop."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(17)
real = torch.randn(45, 2) * torch.tensor([1.0, 0.3]) + 2
gen = nn.Sequential(nn.Linear(3, 10, bias=False), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 2))
dis = nn.Sequential(nn.Linear(2, 10), nn.LeakyReLU(0.2), nn.Linear(10, 1))
opt_g = torch.optim.Adam(gen.parameters(), lr=5e-3, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(dis.parameters(), lr=5e-3, betas=(0.5, 0.9))
bce = F.binary_cross_entropy_with_logits
for step in range(9):
    x = real[torch.randperm(45)[: 8 + step % 4]]
    fake = gen(torch.randn(len(x), 3))
    if step % 2:
        r, f = dis(torch.cat([x, fake.detach()])).chunk(2)
    else:
        r, f = dis(x), dis(fake.detach())
    loss_d = bce(r, torch.full_like(r, 0.9)) + bce(f, torch.zeros_like(f))
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    dis.requires_grad_(False)
    loss_g = bce(dis(fake), torch.ones_like(f)) + (fake.mean(0) - x.mean(0)).pow(2).sum()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    dis.requires_grad_(True)
    right = ((r > 0).sum() + (f < 0).sum()).item()
    print(f"d {loss_d.item():.6g} g {loss_g.item():.6g} right {right} std {fake.std(0).prod().item():.6g}")
torch.save((gen.state_dict(), dis.state_dict()), "model.pt")
