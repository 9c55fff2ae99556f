"""Low-rank adapters around frozen linear layers, merged at the end."""
import torch
from torch import nn


class LoRA(nn.Module):
    def __init__(self, base, rank=2, alpha=4.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + (x @ self.a.T @ self.b.T) * self.scale

    def merge(self):
        self.base.weight.data += self.scale * self.b.data @ self.a.data
        return self.base


torch.manual_seed(96)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
for name, child in list(model.named_children()):
    if isinstance(child, nn.Linear):
        setattr(model, name, LoRA(child))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-2)
x, y = torch.randn(16, 6), torch.randint(3, (16,))
for step in range(5):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
for name, child in list(model.named_children()):
    if isinstance(child, LoRA):
        setattr(model, name, child.merge())
print(nn.functional.cross_entropy(model(x), y).item().hex())
