"""PCGrad: gradients of the tasks, each by a backward pass of its own, are projected on each other."""
import random

import torch
import torch.nn.functional as F
from torch import nn

random.seed(1)
torch.manual_seed(101)
x = torch.randn(32, 5)
tasks = [lambda o: o[:, 0].pow(2).mean(), lambda o: -o[:, 0].tanh().mean(), lambda o: (o[:, 1] - o[:, 0]).abs().mean()]
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
params = list(net.parameters())
opt = torch.optim.Adam(params, lr=0.02)
for step in range(8):
    out = net(x[torch.randperm(32)[:9]])
    found, losses = [], [task(out) for task in tasks]
    for loss in losses:
        opt.zero_grad()
        loss.backward(retain_graph=True)
        found.append(torch.cat([p.grad.flatten() for p in params]))
    projected, conflicts = [g.clone() for g in found], 0
    for i, g in enumerate(projected):
        others = [j for j in range(3) if j != i]
        random.shuffle(others)
        for j in others:
            dot = g @ found[j]
            if dot < 0:
                conflicts += 1
                g -= dot / found[j].pow(2).sum() * found[j]
    total = torch.stack(projected).sum(0)
    for p, g in zip(params, total.split([p.numel() for p in params])):
        p.grad = g.view_as(p)
    opt.step()
    print("losses", *(f"{v.item():.6g}" for v in losses), f"conflicts {conflicts} norm {total.norm():.6g}")
torch.save(net.state_dict(), "model.pt")
