"""Functional forward over an OrderedDict of tensors, Adam written out, state kept by name."""
from collections import OrderedDict

import torch
import torch.nn.functional as F

torch.manual_seed(105)
weights = OrderedDict()
for i, (a, b) in enumerate([(4, 12), (12, 12), (12, 2)]):
    weights[f"{i}.weight"] = torch.empty(b, a)
    torch.nn.init.xavier_uniform_(weights[f"{i}.weight"])
    weights[f"{i}.bias"] = torch.zeros(b)
for w in weights.values():
    w.requires_grad_()
state = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}


def forward(w, x):
    for i in range(3):
        x = F.linear(x, w[f"{i}.weight"], w[f"{i}.bias"])
        x = F.gelu(x) if i < 2 else x
    return x


x, y = torch.randn(16, 4), torch.randint(2, (16,))
for t in range(1, 7):
    loss = F.cross_entropy(forward(weights, x), y)
    for (name, w), g in zip(weights.items(), torch.autograd.grad(loss, list(weights.values()))):
        m, v = state[name]
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.99).addcmul_(g, g, value=0.01)
        w.data -= 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
    print(t, loss.item().hex())
