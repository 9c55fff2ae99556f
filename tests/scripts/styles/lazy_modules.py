"""Lazy modules get their shapes from a dry run before the optimizer is made."""
import torch
from torch import nn

torch.manual_seed(62)
model = nn.Sequential(
    nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(3)
)
model(torch.randn(2, 1, 6, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
x, y = torch.randn(8, 1, 6, 6), torch.randint(3, (8,))
for step in range(5):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
print(model)
