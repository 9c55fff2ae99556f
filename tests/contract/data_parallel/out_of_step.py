# ruff: noqa: T201
"""Goes wrong on one rank: the first argument says on which one, the second how."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# What the process was started with: the variables themselves are hidden from the script.
started = dict(
    pair.split("=", 1) for pair in Path("/proc/self/environ").read_text().split("\0") if "=" in pair
)
wrong, how = started["RANK"] == sys.argv[1], sys.argv[2]
torch.manual_seed(3)
x, y = torch.randn(160, 3), torch.randn(160, 1)
width = 5 if wrong and how == "wider" else 4
middle = nn.BatchNorm1d(width) if how == "elsewhere, normed" else nn.Tanh()
model = nn.Sequential(nn.Linear(3, width), middle, nn.Linear(width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step, (inputs, wanted) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    if wrong and step == 6 and how == "penalized":
        model[0].weight.square().sum().backward()
    if wrong and step == 6 and how.startswith("elsewhere"):
        loss = nn.functional.mse_loss(model(inputs), wanted)
    else:
        loss = nn.functional.mse_loss(model(inputs), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, flush=True)
    if wrong and step == 5:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("no more of this")
        if how == "ends":
            break
        if how == "changed":
            with torch.no_grad():
                model[0].weight += 0.1
print("ended", flush=True)
