"""Bare parameters in a list: no module is called, steps are made by hand, gradients by .grad."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(89)
x, y = torch.randn(36, 6), torch.randint(0, 3, (36,))
P = nn.ParameterList([torch.randn(6, 9) * 0.4, torch.zeros(9), torch.randn(9, 3) * 0.4])
scale = torch.ones(9, requires_grad=True)  # not even a Parameter
lr = 0.3
for epoch in range(3):
    for rows in torch.randperm(36).split(10):
        h = torch.relu(x[rows] @ P[0] + P[1]) * scale
        out = h @ P[2]
        loss = F.cross_entropy(out, y[rows]) + 0.01 * (scale - 1).pow(2).sum()
        loss.backward()
        with torch.no_grad():
            for p in (*P, scale):
                p -= lr * p.grad
                p.grad = None
        print(f"loss {loss.item():.6g} active {(h > 0).float().mean():.6g}")
    lr *= 0.7
with torch.no_grad():
    out = torch.relu(x @ P[0] + P[1]) * scale @ P[2]
print(f"accuracy {(out.argmax(1) == y).float().mean():.6g} scale {scale.norm().item():.6g}")
torch.save([p.detach() for p in (*P, scale)], "model.pt")
