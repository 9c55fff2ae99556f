"""Bayes by backprop with forward returning prediction and KL of the sampled weights."""

import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)


class BayesLinear(nn.Module):
    def __init__(s, i, o):
        super().__init__()
        s.mu = nn.Parameter(torch.randn(o, i) * 0.1)
        s.rho = nn.Parameter(torch.full((o, i), -3.0))

    def forward(s, x):
        sig = F.softplus(s.rho)
        w = s.mu + sig * torch.randn_like(s.mu)
        logq = (-(((w - s.mu) / sig) ** 2) / 2 - sig.log()).sum()
        logp = (-(w**2) / 2).sum()
        return F.linear(x, w), logq - logp


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = BayesLinear(6, 16)
        s.b = BayesLinear(16, 1)

    def forward(s, x):
        h, k1 = s.a(x)
        y, k2 = s.b(torch.tanh(h))
        return y, k1 + k2


net = Net()
opt = torch.optim.Adam(net.parameters(), 1e-2)
X = torch.randn(64, 6)
Y = X[:, :1] * 2
for e in range(6):
    for i in range(0, 64, 16):
        y, kl = net(X[i : i + 16])
        loss = F.mse_loss(y, Y[i : i + 16]) + kl / 64 / 100
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(e, f"{loss.item():.5f} {kl.item():.3f}")
torch.save(net.state_dict(), "model.pt")
