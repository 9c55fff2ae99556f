"""Gradients of several micro-batches are added up, clipped by value, then used."""
import torch
from torch import nn

torch.manual_seed(54)
model = nn.Sequential(nn.Flatten(), nn.Linear(9, 16), nn.ReLU6(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accumulation = 3
data = [(torch.randn(4, 3, 3), torch.randint(2, (4,))) for _ in range(8)]
optimizer.zero_grad()
for i, (x, y) in enumerate(data):
    loss = nn.functional.cross_entropy(model(x), y) / accumulation
    loss.backward()
    if (i + 1) % accumulation == 0 or i + 1 == len(data):
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        print("step", total.item().hex())
    print(i, loss.item().hex())
