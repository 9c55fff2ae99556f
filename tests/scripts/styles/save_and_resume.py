"""Saves a checkpoint into a buffer half-way, forgets everything, loads it and goes on."""
import io

import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(5, 12), nn.Dropout(0.3), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return model, optimizer, scheduler


def run(parts, start, stop):
    model, optimizer, scheduler = parts
    for step in range(start, stop):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(step, loss.item().hex())


torch.manual_seed(65)
x, y = torch.randn(16, 5), torch.randint(2, (16,))
parts = build()
run(parts, 0, 3)
file = io.BytesIO()
torch.save({"parts": [p.state_dict() for p in parts], "rng": torch.get_rng_state()}, file)
del parts
torch.manual_seed(99)
parts = build()
file.seek(0)
saved = torch.load(file)
for part, state in zip(parts, saved["parts"]):
    part.load_state_dict(state)
torch.set_rng_state(saved["rng"])
run(parts, 3, 6)
