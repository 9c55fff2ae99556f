"""A graph net whose normalised adjacency is a CSR tensor."""

import sys, warnings

warnings.simplefilter("ignore")
import torch
from torch import nn

torch.manual_seed(0)
A = (torch.rand(10, 10) < 0.3).float()
A = A / A.sum(1, keepdim=True).clamp(min=1)


class G(nn.Module):
    def __init__(s, adj, buf):
        super().__init__()
        s.l = nn.Linear(4, 3)
        if buf:
            s.register_buffer("adj", adj, persistent=False)
        else:
            s.adj = adj

    def forward(s, x):
        return s.l(s.adj @ x)


class H(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(4, 3)

    def forward(s, a, x):
        return s.l(a @ x)


X = torch.randn(10, 4)
for name, adj in (("coo", A.to_sparse()), ("csr", A.to_sparse_csr())):
    for kind in ("attribute", "buffer", "argument"):
        m = H() if kind == "argument" else G(adj, kind == "buffer")
        o = torch.optim.SGD(m.parameters(), 0.1)
        r = []
        for e in range(4):
            try:
                y = m(adj, X) if kind == "argument" else m(X)
                l = y.square().mean()
                o.zero_grad()
                l.backward()
                o.step()
                r.append(f"{l.item():.4f}")
            except Exception as e:
                r.append(f"{type(e).__name__}: {str(e)[:70]}")
        print(name, kind, r)
torch.save(m.state_dict(), "model.pt")
