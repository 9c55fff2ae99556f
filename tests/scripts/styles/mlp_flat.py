"""A classifier of points, written from top to bottom."""
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 2)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(6):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
print("weights", sum(p.double().abs().sum() for p in model.parameters()).item().hex())
