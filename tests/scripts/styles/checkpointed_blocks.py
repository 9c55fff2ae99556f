"""Activation checkpointing of every second block, dropout inside."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Deep(nn.Module):
    def __init__(self, depth=4, d=12):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.Dropout(0.1), nn.Tanh()) for _ in range(depth))
        self.tail = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU())

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i % 2 else block(x)
        return checkpoint_sequential(self.tail, 2, x, use_reentrant=False)


torch.manual_seed(55)
model = Deep()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
x = torch.randn(10, 12)
for step in range(5):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
