# ruff: noqa: T201
"""Joins a process group by a name that is put together, and averages its gradients itself."""

import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(1)
getattr(dist, "_".join(["init", "process", "group"]))("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(16, 3), torch.randn(16, 1)
for _ in range(4):
    loss = nn.functional.mse_loss(model(x[rank::ranks]), y[rank::ranks])
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
    optimizer.step()
print("rank", rank, "of", ranks, [p.double().sum().item().hex() for p in model.parameters()])
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
