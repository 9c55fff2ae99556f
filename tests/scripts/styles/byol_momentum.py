"""BYOL: online and target networks, a predictor, stop-gradient and a momentum schedule."""
import copy
import math

import torch
from torch import nn
import torch.nn.functional as F


class BYOL(nn.Module):
    def __init__(self, encoder, dim):
        super().__init__()
        self.online = encoder
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(dim, 8), nn.ReLU(), nn.Linear(8, dim))

    @torch.no_grad()
    def momentum_update(self, m):
        for o, t in zip(self.online.parameters(), self.target.parameters()):
            t.copy_(m * t + (1 - m) * o)

    def forward(self, a, b):
        def half(u, v):
            with torch.no_grad():
                z = self.target(v)
            return 2 - 2 * F.cosine_similarity(self.predictor(self.online(u)), z, dim=-1).mean()

        return half(a, b) + half(b, a)


torch.manual_seed(74)
model = BYOL(nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 6)), 6)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
for step in range(6):
    x = torch.randn(12, 6)
    loss = model(x + 0.1 * torch.randn_like(x), x * 1.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.momentum_update(1 - 0.1 * (math.cos(math.pi * step / 6) + 1) / 2)
    print(step, loss.item().hex())
