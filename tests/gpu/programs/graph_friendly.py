# ruff: noqa: T201
"""A loop in which CUDA graphs are safe, and which would notice memory that a replay overwrote.

    python graph_friendly.py DEVICE [input-gradients]

One forward and backward pass per step; outputs, and gradients of the inputs where asked for, are
kept to the end. There is validation in between, one batch of another size, and an averaged copy.
"""

import copy
import json
import sys

import torch
from torch import nn

STEPS, ODD = 12, 9


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(device, input_gradients):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Block(64), Block(64), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(STEPS, 32, 16).to(device)
    losses, kept, slopes, ema = [], [], [], None
    for step, batch in enumerate(data):
        x = batch[:20] if step == ODD else batch
        x = x.clone().requires_grad_(input_gradients)
        optimizer.zero_grad()
        output = model(x)
        loss = (output - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)  # the tensors themselves: what they hold is read at the end
        kept.append(output.detach())
        if input_gradients:
            slopes.append(x.grad)
        if step == STEPS // 2:
            ema = copy.deepcopy(model).requires_grad_(False)
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                kept.append(model(data[0]))
            model.train()
    kept.append(ema.eval()(data[0]))
    results = {
        "losses": [loss.item() for loss in losses],
        "kept": [output.square().sum().item() for output in kept],
        "slopes": [1e3 * slope.norm().item() for slope in slopes],
        "weights": [p.norm().item() for p in model.parameters()],
        "buffers": [b.float().norm().item() for b in model.buffers()],
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], "input-gradients" in sys.argv[2:])
