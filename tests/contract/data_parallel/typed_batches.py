# ruff: noqa: T201
"""Batches of a class with a mask now and then and names of files; and a checkpoint with dropout."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Batch:
    x: Tensor
    paths: list[str]
    mask: Tensor | None = None


@dataclass
class Node:
    x: Tensor
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: Batch) -> Tensor:
        h = self.layer(batch.x)
        return h if batch.mask is None else h * batch.mask


class Tree(Net):
    def forward(self, node: Node) -> Tensor:
        return self.layer(node.x) + sum(map(self, node.children))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 1)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))


torch.manual_seed(0)
net, tree, other = Net(), Tree(), Checkpointed()
parameters = [*net.parameters(), *tree.parameters(), *other.parameters()]
optimizer = torch.optim.SGD(parameters, 0.1)
data = torch.Generator().manual_seed(1)
for step in range(16):
    x = torch.randn(8, 4, generator=data)
    paths = [f"{step}-{row}.png" for row in range(8)]
    loss = net(Batch(x, paths, torch.ones(8, 3) if step % 2 else None)).square().mean()
    root = Node(x)
    root.children.append(Node(-x, root))
    loss = loss + tree(root).square().mean()
    optimizer.zero_grad()
    (loss + other(x).square().mean()).backward()
    optimizer.step()
    print(step, loss.item())
