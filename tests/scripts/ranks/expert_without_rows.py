"""Two experts by the sign of a feature; in the third batch only the second half has negative rows."""

import torch
from torch import nn

torch.manual_seed(0)


class MoE(nn.Module):
    def __init__(s):
        super().__init__()
        s.x = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        s.o = nn.Linear(4, 1)

    def forward(s, x):
        out = torch.zeros_like(x)
        for k, f in enumerate(s.x):
            i = ((x[:, 0] < 0) == bool(k)).nonzero()[:, 0]
            if len(i):
                out = out.index_add(0, i, f(x[i]))
        return s.o(out)


m = MoE()
o = torch.optim.SGD(m.parameters(), 0.1)
for s in range(8):
    x = torch.randn(8, 4)
    x[::2, 0] = 1.0
    x[1::2, 0] = -1.0
    if s == 4:
        x[:4, 0] = 1.0
    l = m(x).square().mean()
    o.zero_grad()
    l.backward()
    o.step()
    print(s, f"{l.item():.5f}")
torch.save(m.state_dict(), "model.pt")
