# ruff: noqa: T201
"""A script that knows nothing of ranks: each batch is whole, and its loss is outside of the model.

    python ranks.py DEVICE

Each rank writes which GPU it computes on to stderr, which its log keeps; what is printed to stdout
is shown once.
"""

import json
import sys

import torch
from torch import nn

STEPS, ODD = 8, 5


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        # A bias before the norm would have no gradient but rounding, by which AdamW moves it.
        self.first, self.batch_norm = nn.Linear(16, width, bias=False), nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.batch_norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(device):
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(STEPS, 32, 16), torch.randint(0, 4, (STEPS, 32))
    losses, right = [], 0
    for step in range(STEPS):
        rows = 21 if step == ODD else 32  # one batch that two ranks can't halve
        x, y = inputs[step, :rows].to(device), targets[step, :rows].to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        for x, y in zip(inputs, targets, strict=True):
            right += (model(x.to(device)).argmax(1).cpu() == y).sum().item()
    state = model.state_dict()
    results = {
        "losses": losses,
        "right": [right],
        "weights": [value.float().norm().item() for value in state.values()],
        "shapes": [float(value.numel()) for value in state.values()],
    }
    print(json.dumps(results))
    if device == "cuda":
        here = f"{torch.cuda.get_device_properties(0).uuid}"
        print(f"computed on {here}, one of {torch.cuda.device_count()}", file=sys.stderr)
    else:
        print("computed on the CPU, one of 1", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
