"""MoCo: momentum encoder, a queue of keys kept as a buffer outside of forward, shuffled keys."""
import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(71)
x = torch.randn(48, 6)
encoder = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
momentum = copy.deepcopy(encoder)
for p in momentum.parameters():
    p.requires_grad = False
queue, at = F.normalize(torch.randn(24, 4), dim=1), 0
opt = torch.optim.SGD(encoder.parameters(), lr=0.1, weight_decay=1e-3)
for step in range(9):
    rows = torch.randperm(48)[:8]
    q = F.normalize(encoder(x[rows] + 0.1 * torch.randn(8, 6)), dim=1)
    with torch.no_grad():
        for p, m in zip(encoder.parameters(), momentum.parameters()):
            m.mul_(0.9).add_(p, alpha=0.1)
        order = torch.randperm(8)
        k = F.normalize(momentum(x[rows][order]), dim=1)[order.argsort()]
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
    loss = F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
    opt.zero_grad()
    loss.backward()
    opt.step()
    queue[at : at + 8] = k
    at = (at + 8) % 24
    top = (logits.argmax(1) == 0).sum().item()
    print(f"loss {loss.item():.6g} top {top} rank {(logits > logits[:, :1]).sum().item()} "
          f"queue {queue.std(0).sum():.6g}")
torch.save({"q": encoder.state_dict(), "k": momentum.state_dict(), "queue": queue}, "model.pt")
