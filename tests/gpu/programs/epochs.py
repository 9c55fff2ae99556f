# ruff: noqa: T201
"""Epochs whose batches are read by processes that are forked for each; prints the losses.

    python epochs.py DEVICE ends|wrong

With "wrong" a class that isn't there ends it: a kernel of the device finds that.
"""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, ROWS, CLASSES = 3, 256, 4


def main(device, how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, CLASSES)).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    most = CLASSES if how == "ends" else 2 * CLASSES
    data = TensorDataset(torch.randn(ROWS, 16), torch.randint(0, most, (ROWS,)))
    # After an error of the device torch ends a process that frees such memory.
    pinned = device == "cuda" and how == "ends"
    losses = []
    for _ in range(EPOCHS):
        for x, y in DataLoader(data, 32, num_workers=2, pin_memory=pinned):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main(*sys.argv[1:])
