"""Adaptive clipping by the norms of units, then by value; counts what was clipped."""
import torch
from torch import nn

torch.manual_seed(5)
x, t = torch.randn(27, 4) * 3, torch.randn(27, 2)
net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
opt = torch.optim.RMSprop(net.parameters(), lr=0.01)


def units(p):
    return p.norm(dim=1, keepdim=True) if p.dim() > 1 else p.abs()


for step in range(9):
    rows = torch.arange(step, 27, 3)
    loss = (net(x[rows]) - t[rows]).abs().pow(1.5).mean().pow(0.7)
    opt.zero_grad()
    loss.backward()
    clipped = 0
    for p in net.parameters():
        limit = 0.05 * units(p.detach()).clamp(min=1e-3)
        norm = units(p.grad)
        clipped += int((norm > limit).sum())
        p.grad.mul_(torch.where(norm > limit, limit / norm.clamp(min=1e-6), 1.0))
    before = torch.cat([p.grad.flatten() for p in net.parameters()]).abs().max()
    nn.utils.clip_grad_value_(net.parameters(), 0.02)
    opt.step()
    print(f"loss {loss.item():.6g} clipped {clipped} largest {before:.6g}")
torch.save(net.state_dict(), "model.pt")
