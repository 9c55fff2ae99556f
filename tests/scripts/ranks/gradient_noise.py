"""Annealed noise is put on gradients, signs are taken of some, and decoupled decay is done by hand."""
import torch
from torch import nn

torch.manual_seed(23)
x = torch.randn(30, 4)
t = (x[:, :2] * x[:, 2:]).tanh()
net = nn.Sequential(nn.Linear(4, 10), nn.Mish(), nn.Linear(10, 2))
velocity = {p: torch.zeros_like(p) for p in net.parameters()}
for step in range(10):
    rows = torch.randperm(30)[: 5 + step % 5]
    out = net(x[rows])
    loss = (out - t[rows]).norm() / len(rows) ** 0.5
    net.zero_grad()
    loss.backward()
    sigma = (0.01 / (1 + step) ** 0.55) ** 0.5
    with torch.no_grad():
        for name, p in net.named_parameters():
            g = p.grad + sigma * torch.randn_like(p)
            g = g.sign() * 0.1 if name.endswith("bias") else g
            velocity[p].mul_(0.9).add_(g)
            p.mul_(1 - 1e-3).sub_(velocity[p], alpha=0.05)
    print(f"rms {loss.item():.6g} sigma {sigma:.6g} v {sum(v.norm() for v in velocity.values()):.6g}")
torch.save(net.state_dict(), "model.pt")
