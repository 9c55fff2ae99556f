"""Saves everything, forgets it, loads it (random state too) and goes on; the whole model pickled too."""
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR


def fresh():
    net = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.AdamW(net.parameters(), lr=0.02, amsgrad=True)
    return net, opt, OneCycleLR(opt, max_lr=0.05, total_steps=20)


random.seed(3)
torch.manual_seed(113)
x, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
net, opt, plan = fresh()
for step in range(12):
    if step == 5:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "plan": plan.state_dict(),
                    "rng": torch.get_rng_state(), "py": random.getstate()}, "middle.pt")
        torch.manual_seed(999)
        random.seed(999)
        net, opt, plan = fresh()
        saved = torch.load("middle.pt", weights_only=False)
        for name, part in (("net", net), ("opt", opt), ("plan", plan)):
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["rng"])
        random.setstate(saved["py"])
    if step == 9:
        torch.save(net, "whole.pt")
        net.load_state_dict(torch.load("whole.pt", weights_only=False).state_dict())
    rows = torch.tensor(random.sample(range(40), 9))
    loss = F.cross_entropy(net(x[rows] + 0.01 * torch.randn(9, 5)), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    plan.step()
    print(f"{step} loss {loss.item():.6g} lr {plan.get_last_lr()[0]:.6g} var {net[1].running_var.sum():.6g}")
torch.save(net.state_dict(), "model.pt")
