"""BYOL: online and averaged network, predictor, two symmetrical calls a step, tau by a schedule."""
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(8)
x = torch.randn(33, 6)
online = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
predictor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
target = copy.deepcopy(online).requires_grad_(False)
opt = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.05, momentum=0.8)
steps = 9
for step in range(steps):
    rows = torch.randperm(33)[: 7 + step % 3]
    one, two = x[rows] + 0.2 * torch.randn(len(rows), 6), x[rows] + 0.2 * torch.randn(len(rows), 6)
    with torch.no_grad():
        t1, t2 = target(one), target(two)
    loss = (2 - F.cosine_similarity(predictor(online(one)), t2).mean()
            - F.cosine_similarity(predictor(online(two)), t1).mean())
    opt.zero_grad()
    loss.backward()
    opt.step()
    tau = 1 - 0.1 * (math.cos(math.pi * step / steps) + 1) / 2
    with torch.no_grad():
        for p, q in zip(target.parameters(), online.parameters()):
            p.lerp_(q, 1 - tau)
    spread = F.normalize(t1, dim=1).std(0).mean()
    print(f"loss {loss.item():.6g} spread {spread:.6g} tau {tau:.6g}")
torch.save((online.state_dict(), target.state_dict(), predictor.state_dict()), "model.pt")
