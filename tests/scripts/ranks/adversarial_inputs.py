"""FGSM, then PGD with projections, then training on the found inputs, all by gradients of inputs."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
X, Y = torch.rand(30, 6), torch.arange(30) % 3
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(6):
    x, y = X[step * 5 : step * 5 + 5 + step % 2], Y[step * 5 : step * 5 + 5 + step % 2]
    x = x.clone().requires_grad_()
    F.cross_entropy(model(x), y).backward()
    fgsm = (x + 0.1 * x.grad.sign()).detach()
    delta = torch.zeros_like(x).uniform_(-0.05, 0.05)
    for _ in range(3):
        delta.requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(model(x.detach() + delta), y, reduction="sum"), delta)
        delta = (delta.detach() + 0.05 * g / g.norm(dim=1, keepdim=True).clamp(min=1e-9)).clamp(-0.1, 0.1)
    opt.zero_grad()
    clean, robust = (F.cross_entropy(model(v), y) for v in (fgsm, (x + delta).detach()))
    (clean + 2 * robust).backward()
    opt.step()
    print(f"{step} clean {clean.item():.6g} robust {robust.item():.6g} g0 {x.grad[0].norm():.6g} "
          f"delta {delta.norm():.6g}")
torch.save(model.state_dict(), "model.pt")
