# ruff: noqa: T201
"""What CUDA graphs get wrong where they are used blindly: outputs that outlive the next call.

    python kept_outputs.py DEVICE

Gradient accumulation, two forwards before one backward, validation in between, and outputs kept
over the whole run; all of it goes into the numbers that are printed.
"""

import json
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Block(64), Block(64), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(8, 2, 32, 16).to(device)
    kept, losses = [], []
    for batch in data:
        optimizer.zero_grad()
        for part in batch:  # gradients of two passes add up
            first, second = model(part), model(part.flip(0))
            loss = (first - second).square().mean() + (first * second).mean()
            (loss / len(batch)).backward()
            losses.append(loss.item())
            kept.append(first.detach())
        optimizer.step()
        with torch.no_grad():
            kept.append(model(batch[0]))
    results = {
        "losses": losses,
        "kept": [output.square().sum().item() for output in kept],
        "weights": [p.norm().item() for p in model.parameters()],
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
