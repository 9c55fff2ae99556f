# ruff: noqa: T201
"""Trains from one state twice, by its own checkpoint and by its seed, with dropout.

After the 16th and before the 32nd call of the model, which are verified.
"""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 1))


def train(what, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(what, loss.item().hex())


train("warmup", steps=16)
weights = {name: value.clone() for name, value in model.state_dict().items()}
kept = torch.get_rng_state()
train("kept")
model.load_state_dict(weights)
torch.set_rng_state(kept)
train("restored")
for _ in range(2):
    torch.manual_seed(1)
    model.load_state_dict(weights)
    train("seeded")
