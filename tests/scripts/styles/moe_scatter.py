"""Mixture of experts with top-1 routing; the experts' outputs are scattered back."""
import torch
from torch import nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, dim, n_experts):
        super().__init__()
        self.gate = nn.Linear(dim, n_experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(n_experts))
        self.aux = None

    def forward(self, x):
        probs = F.softmax(self.gate(x).float(), -1)
        weight, index = probs.max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (index == e).nonzero().squeeze(1)
            if rows.numel():
                out[rows] = (expert(x[rows]) * weight[rows, None]).to(out.dtype)
        share = F.one_hot(index, len(self.experts)).float().mean(0)
        self.aux = (share * probs.mean(0)).sum() * len(self.experts)
        return x + out


torch.manual_seed(32)
model = nn.Sequential(nn.Linear(6, 8), MoE(8, 3), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = torch.randn(24, 6), torch.randint(4, (24,))
for step in range(6):
    loss = F.cross_entropy(model(x), y) + 0.01 * model[1].aux
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), model[1].aux.item().hex())
