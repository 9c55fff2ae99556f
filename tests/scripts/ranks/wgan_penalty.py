"""WGAN-GP: several critic steps, gradients of the critic on interpolates with create_graph."""
import torch
from torch import nn

torch.manual_seed(179)
real = torch.randn(50, 2) * 0.5 + torch.tensor([1.0, -1.0])
critic = nn.Sequential(nn.Linear(2, 12), nn.SiLU(), nn.Linear(12, 1, bias=False))
gen = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2))
opt_c = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.0, 0.9))
opt_g = torch.optim.Adam(gen.parameters(), lr=5e-3, betas=(0.0, 0.9))
for step in range(5):
    for _ in range(2):
        x = real[torch.randint(0, 50, (7,))]
        fake = gen(torch.randn(7, 3)).detach()
        mix = torch.rand(7, 1)
        mix = (mix * x + (1 - mix) * fake).requires_grad_()
        score = critic(mix)
        (g,) = torch.autograd.grad(score, mix, torch.ones_like(score), create_graph=True)
        penalty = (g.norm(2, dim=1) - 1).pow(2).mean()
        distance = critic(x).mean() - critic(fake).mean()
        opt_c.zero_grad()
        (10 * penalty - distance).backward()
        opt_c.step()
        print(f"distance {distance.item():.6g} penalty {penalty.item():.6g} g {critic[0].weight.grad.norm():.6g}")
    opt_g.zero_grad()
    (-critic(gen(torch.randn(8, 3))).mean()).backward()
    opt_g.step()
    print(f"gen {gen[2].weight.grad.norm():.6g} first {gen[0].bias.grad.norm():.6g}")
torch.save((critic.state_dict(), gen.state_dict()), "model.pt")
