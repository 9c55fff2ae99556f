"""Lookahead: slow weights are moved each third step; evaluation with slow and with fast ones."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(53)
x = torch.randn(33, 5)
y = (x.sum(1) > 0).float()
net = nn.Sequential(nn.Linear(5, 7), nn.Hardswish(), nn.Linear(7, 1))
fast = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.5)
slow = [p.detach().clone() for p in net.parameters()]


@torch.no_grad()
def brier(weights=None):
    backup = [p.clone() for p in net.parameters()]
    for p, w in zip(net.parameters(), weights or backup):
        p.copy_(w)
    value = (net(x).sigmoid()[:, 0] - y).pow(2).mean().item()
    for p, w in zip(net.parameters(), backup):
        p.copy_(w)
    return value


for step in range(1, 10):
    rows = torch.randperm(33)[:7]
    loss = F.binary_cross_entropy_with_logits(net(x[rows])[:, 0], y[rows], pos_weight=torch.tensor(1.5))
    fast.zero_grad()
    loss.backward()
    fast.step()
    print(f"{step} loss {loss.item():.6g} fast {brier():.6g} slow {brier(slow):.6g}")
    if step % 3 == 0:
        with torch.no_grad():
            for p, s in zip(net.parameters(), slow):
                s.add_(p - s, alpha=0.5)
                p.copy_(s)
torch.save([net.state_dict(), slow], "model.pt")
