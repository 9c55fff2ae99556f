"""Forward gives its input back beside what it computes; the script scales what it got in place."""

import torch
from torch import nn

torch.manual_seed(0)


class Enc(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(6, 3)

    def forward(s, x):
        return x, s.l(x), x[:, :2]


m = Enc()
o = torch.optim.SGD(m.parameters(), 0.02)
X = torch.randn(32, 6)
for e in range(6):
    x = X[:16] if e % 2 else X[16:]
    skip, h, two = m(x)
    l = (h.sum(1) - skip.sum(1)).square().mean()
    o.zero_grad()
    l.backward()
    o.step()
    skip.mul_(0.9)
    two.add_(0.1)
    print(e, f"{l.item():.5f} {X.sum():.4f}")
torch.save(m.state_dict(), "model.pt")
