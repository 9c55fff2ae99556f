# ruff: noqa: T201
"""A forward that puts tensors on its module: those lie in the memory of a CUDA graph.

    python keeps_tensors.py DEVICE features|state|list

Everything that was put there is read at the end, when replays have overwritten that memory.
"""

import json
import sys

import torch
from torch import nn

STEPS = 10


class Model(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)
        self.where, self.kept, self.all = where, None, []
        self.mean = torch.zeros(())

    def forward(self, x):
        features = torch.tanh(self.first(x))
        if self.where == "features":
            self.kept = features
        elif self.where == "state":  # each step goes on from what the last one left
            self.mean = 0.9 * self.mean + 0.1 * features.detach().mean()
        else:
            self.all.append(features.detach())
        return self.second(features)


def main(device, where):
    torch.manual_seed(0)
    model = Model(where).to(device)
    model.mean = model.mean.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, kept = [], []
    for batch in torch.randn(STEPS, 32, 16):
        optimizer.zero_grad()
        loss = (model(batch.to(device)) - 1).square().mean()
        if where == "features":  # a penalty on what the forward left, as for sparse activations
            loss = loss + 0.1 * model.kept.abs().mean()
            kept.append(model.kept.detach())
        elif where == "state":
            kept.append(model.mean)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    results = {
        "losses": [loss.item() for loss in losses],
        "kept": [tensor.square().sum().item() for tensor in kept or model.all],
        "weights": [p.norm().item() for p in model.parameters()],
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
