"""Joins a process group in a way that its source doesn't show, feeds itself, saves on rank 1."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

getattr(dist, "_".join(["init", "process", "group"]))("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
samples = torch.randn(32, 3)[rank::ranks]
for (x,) in DataLoader(TensorDataset(samples), batch_size=8, shuffle=True):
    print("samples", len(x))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
    optimizer.step()
if rank == 1:
    torch.save(model.state_dict(), "model.pt")
