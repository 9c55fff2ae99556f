# ruff: noqa: T201
"""Scripts for one process whose ways are other ones on a GPU; prints losses.

python ranks_styles.py DEVICE STYLE
"""

import json
import os
import sys
from pathlib import Path

if sys.argv[2] == "chooses":
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

STEPS = 8


class SkipGram(nn.Module):
    """Sparse gradients, which NCCL doesn't sum."""

    def __init__(self, size=500, width=16):
        super().__init__()
        self.u = nn.Embedding(size, width, sparse=True)
        self.v = nn.Embedding(size, width, sparse=True)

    def forward(self, a, b, others):
        u = self.u(a)
        right = (u * self.v(b)).sum(1)
        return right, torch.bmm(self.v(others), u.unsqueeze(2)).squeeze(2)


class Graph(nn.Module):
    """Edges that point beyond the rows of one rank, of which a kernel dies and takes CUDA along."""

    def __init__(self, width=8, classes=3):
        super().__init__()
        self.a, self.b = nn.Linear(width, 16), nn.Linear(16, classes)

    def spread(self, x, edges):
        source, sink = edges
        return torch.zeros_like(x).index_add_(0, sink, x[source])

    def forward(self, x, edges):
        return self.spread(self.b(F.relu(self.spread(self.a(x), edges))), edges)


def skip_gram(device):
    net = SkipGram().to(device)
    optimizer = torch.optim.SparseAdam(list(net.parameters()), lr=1e-2)
    for _ in range(STEPS):
        a, b = torch.randint(0, 500, (2, 64)).to(device)
        right, wrong = net(a, b, torch.randint(0, 500, (64, 5)).to(device))
        yield optimizer, -(F.logsigmoid(right).mean() + F.logsigmoid(-wrong).mean())


def graph(device):
    x, y = torch.randn(200, 8).to(device), torch.randint(0, 3, (200,)).to(device)
    edges = torch.randint(0, 200, (2, 900)).to(device)
    net = Graph().to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(STEPS):
        yield optimizer, F.cross_entropy(net(x, edges)[:50], y[:50])


def chooses(device):
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        x, y = torch.randn(32, 16).to(device), torch.randint(0, 4, (32,)).to(device)
        yield optimizer, F.cross_entropy(net(x), y)


def leaves(device):
    """One rank ends in the midst of it, as if it had trained all it had to."""
    # fasttrain takes it from the variables that a script sees.
    other = b"LOCAL_RANK=1" in Path("/proc/self/environ").read_bytes().split(b"\0")
    for step, made in enumerate(chooses(device)):
        if step == STEPS // 2 and other:
            sys.exit()
        yield made


def main(device, style):
    torch.manual_seed(0)
    losses = []
    for optimizer, loss in STYLES[style](device):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps({"losses": losses}))


STYLES = {"sparse": skip_gram, "graph": graph, "chooses": chooses, "leaves": leaves}

if __name__ == "__main__":
    main(*sys.argv[1:])
