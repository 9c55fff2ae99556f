"""Batches come from nested generators with a buffer that shuffles."""
import itertools
import random

import torch
from torch import nn

random.seed(6)
torch.manual_seed(6)


def samples():
    for i in itertools.count():
        t = i * 0.37
        yield torch.tensor([t % 1.0, (t * t) % 1.0]), torch.tensor([t % 0.5])


def shuffled(source, size):
    buffer = list(itertools.islice(source, size))
    for item in source:
        k = random.randrange(size)
        yield buffer[k]
        buffer[k] = item


def batched(source, n):
    while True:
        xs, ys = zip(*itertools.islice(source, n))
        yield torch.stack(xs), torch.stack(ys)


model = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3, momentum=0.5, centered=True)
loss_fn = nn.MSELoss()
for x, y in itertools.islice(batched(shuffled(samples(), 32), 8), 7):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
