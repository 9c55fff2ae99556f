"""Models whose calls go on with something that no attribute shows: generators, iterators, tensors' data."""
import itertools
import random

import numpy as np
import torch
from torch import nn

ROWS = np.random.default_rng(4)
BANK = torch.ones(3)


class Dice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.own = random.Random(4)
        self.numpys = np.random.RandomState(5)

    def forward(self, x):
        scale = 1 + self.own.random() + self.numpys.rand() + ROWS.uniform()
        return self.layer(x) * scale


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.scales = itertools.cycle([1.0, 2.0, 3.0])
        self.calls = itertools.count(1)

    def forward(self, x):
        return self.layer(x) * next(self.scales) * min(1.0, next(self.calls) / 9)


class Past(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.mean = torch.zeros(6)

    def forward(self, x):
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        BANK.data.mul_(0.95)
        return self.layer(x - self.mean) * BANK


class Sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen = {}

    def forward(self, x):
        if len(x) not in self.seen:
            self.seen[len(x)] = len(self.seen) + x.detach().mean()
        return self.layer(x) + self.seen[len(x)]


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.more = nn.ModuleList()

    def forward(self, x):
        if len(self.more) < 3:
            self.more.append(nn.Identity())
        return self.layer(x) * len(self.more)


trained = {}
for kind in (Dice, Turns, Past, Sizes, Growing):
    torch.manual_seed(7)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for step in range(9):
        x = torch.randn(10 if step % 3 < 2 else 5, 6)
        loss = (model(x) - x[:, :3]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(kind.__name__, step, f"{loss.item():.6f}", sorted(getattr(model, "seen", ())))
    print(f"{model.layer.weight.norm():.6f} {BANK.sum():.6f}")
    trained[kind.__name__] = model.state_dict()
torch.save(trained, "model.pt")
