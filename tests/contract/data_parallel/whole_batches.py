# ruff: noqa: T201
"""Prints which samples each batch has; the first argument is the size of a batch."""

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Stream(IterableDataset):
    """Every rank reads all of it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))

    def __len__(self) -> int:
        return 12


torch.manual_seed(4)
x, y = torch.randn(72, 5), torch.randn(72, 1)
loader = DataLoader(TensorDataset(torch.arange(72), x, y), int(sys.argv[1]), shuffle=True)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
print("stream", len(DataLoader(Stream(), 4)))
for _ in range(2):
    print("length", len(loader))
    for index, x, y in loader:
        print("samples", *index.tolist())
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9g}")
torch.save(model.state_dict(), "model.pt")
