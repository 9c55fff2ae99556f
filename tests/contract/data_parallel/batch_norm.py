# ruff: noqa: T201
"""A net with BatchNorm in it; its last batch has as many samples as the first argument says."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
n = 7 * 8 + int(sys.argv[1])
images = torch.randn(n, 3, 6, 6) * torch.linspace(0.5, 2, n).view(-1, 1, 1, 1)
labels = (images.mean((1, 2, 3)) > 0).long() + (images[:, 0].mean((1, 2)) > 0).long()
loader = DataLoader(TensorDataset(images, labels), batch_size=8)

model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
    nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(),
    nn.Flatten(), nn.Linear(32, 3),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(2):
    model.train()
    for x, y in loader:
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9g}")
    model.eval()
    with torch.no_grad():
        print(f"loss of evaluation {functional.cross_entropy(model(images), labels).item():.9g}")
torch.save(model.state_dict(), "model.pt")
