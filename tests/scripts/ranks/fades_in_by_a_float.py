"""A term over the batch fades in by a float that the script sets."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(5, 8)
        s.o = nn.Linear(8, 1)
        s.gamma = nn.Parameter(torch.zeros(()))
        s.alpha = 0.0

    def forward(s, x):
        h = torch.tanh(s.a(x))
        c = h - h.mean(0)
        return s.o(h + s.alpha * c)


m = Net()
o = torch.optim.SGD(m.parameters(), 0.05)
X = torch.randn(64, 5)
X[::2] += 1
X = X[X[:, 0].argsort()]
for s in range(40):
    x = X[s % 4 * 16 :][:16]
    m.alpha = max(0.0, (s - 20) / 20)
    l = (m(x) - x.sum(1, keepdim=True)).square().mean()
    o.zero_grad()
    l.backward()
    o.step()
    if s % 4 == 3:
        print(s, f"{l.item():.5f}")
torch.save(m.state_dict(), "model.pt")
