# ruff: noqa: T201
"""Trains convolutions and tells the allocator's peak and what it finds in the environment.

python memory.py DEVICE
"""

import json
import os
import sys

import torch
from torch import nn

device = sys.argv[1]
batch = 256 if device == "cuda" else 8  # activations outweigh weights and cuDNN's workspace
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Sequential(nn.Conv2d(c, 32, 3, padding=1), nn.ReLU()) for c in (3, 32, 32)),
    nn.Flatten(),
    nn.Linear(32 * 32 * 32, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(batch, 3, 32, 32).to(device)).square().mean().backward()
    optimizer.step()
found = {
    "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    "cudnn": os.environ.get("TORCH_CUDNN_V8_API_ENABLED"),
}
print(json.dumps(found))
