# ruff: noqa: T201
"""Seeds nothing: prints its first weights, its samples with their noise, and its dropout.

The first argument is the number of workers that load the samples.
"""

import random
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        noise = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return index, torch.tensor(noise, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(64, 1)

    def forward(self, x):
        kept = self.dropout(torch.ones(len(x), 64))
        return self.linear(kept), kept


model = Net()
print("weights", [p.double().sum().item().hex() for p in model.parameters()])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=int(sys.argv[1]))
for _ in range(2):
    for index, noise in loader:
        print("samples", *index.tolist())
        for name, drawn in zip(("torch", "random", "numpy"), noise.T.tolist(), strict=True):
            print(name, *(number.hex() for number in drawn))
        out, kept = model(noise)
        print("dropout", *("".join("01"[bool(k)] for k in row) for row in kept))
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
print("trained", [p.double().sum().item().hex() for p in model.parameters()])
