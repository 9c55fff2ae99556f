"""Gradient hooks on parameters: clamped, masked, summed up; and a post-accumulate hook that steps."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(37)
x, y = torch.randn(30, 5), torch.randint(0, 3, (30,))
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
seen = []
mask = (torch.rand(8, 5) > 0.4).float()
net[0].weight.register_hook(lambda g: g * mask)
net[0].bias.register_hook(lambda g: seen.append(g.norm().item()))
net[2].weight.register_hook(lambda g: g.clamp(-0.03, 0.03))
steppers = {p: torch.optim.SGD([p], lr=0.2) for p in net[2].parameters()}


def step_at_once(p):
    seen.append(p.grad.abs().sum().item())
    steppers[p].step()
    p.grad = None


for p in steppers:
    p.register_post_accumulate_grad_hook(step_at_once)
opt = torch.optim.SGD(net[0].parameters(), lr=0.2)
for step in range(8):
    rows = slice(3 * step, 3 * step + 8)
    loss = F.cross_entropy(net(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} g {net[0].weight.grad.norm():.6g} seen", *(f"{s:.6g}" for s in sorted(seen)))
    seen.clear()
torch.save(net.state_dict(), "model.pt")
