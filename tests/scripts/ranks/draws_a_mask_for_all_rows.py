"""Reconstruction by one random mask a batch, which forward gives back; evaluated without gradients."""

import torch
from torch import nn

torch.manual_seed(0)


class Rec(nn.Module):
    def __init__(s, L=10):
        super().__init__()
        s.a = nn.Linear(L, 20)
        s.b = nn.Linear(20, L)

    def forward(s, x):
        hidden = torch.randperm(x.size(1))[:3]
        keep = torch.ones(x.size(1)).index_fill(0, hidden, 0.0)
        return s.b(torch.relu(s.a(x * keep))), hidden


m = Rec()
X = torch.randn(32, 10)
with torch.no_grad():
    for k in range(6):
        p, h = m(X)
        vis = torch.ones(10).index_fill(0, h, 0.0)
        ref = (
            torch.relu(X * vis @ m.a.weight.T + m.a.bias) @ m.b.weight.T + m.b.bias
        )  # what the mask that was given back must lead to
        print(k, f"{(p - ref).abs().max().item():.4f}")
torch.save(m.state_dict(), "model.pt")
