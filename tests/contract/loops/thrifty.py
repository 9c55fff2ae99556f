"""Activation checkpointing of both kinds, gradient accumulation, a loss inside the model."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

call = globals().get("call", lambda module, *args: module(*args))
fused = globals().get("fused")


class Block(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + checkpoint(self.body, x, use_reentrant=self.use_reentrant)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.Sequential(Block(use_reentrant=True), Block(use_reentrant=False))
        self.head = nn.Linear(8, 1)

    def forward(self, x, target):
        chance = self.head(self.blocks(self.stem(x))).sigmoid()
        return {"chance": chance, "loss": nn.functional.binary_cross_entropy(chance, target)}


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
outside = nn.BCELoss()
losses = []
for _ in range(20):
    optimizer.zero_grad()
    for _ in range(2):
        x = torch.randn(16, 8)
        target = (x.sum(1, keepdim=True) > 0).float()
        output = call(model, x, target)
        loss = (output["loss"] + outside(output["chance"], target)) / 2
        loss.backward()
        losses.append(loss.item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

result = model.state_dict()
