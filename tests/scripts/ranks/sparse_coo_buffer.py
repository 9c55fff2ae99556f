"""A graph convolution whose adjacency is a sparse buffer."""
import torch
from torch import nn

torch.manual_seed(0)
A = (torch.rand(10, 10) < 0.3).float()


class G(nn.Module):
    def __init__(s, adj):
        super().__init__()
        s.l = nn.Linear(4, 3)
        s.register_buffer("adj", adj)

    def forward(s, x):
        return s.l(torch.sparse.mm(s.adj, x))


m = G(A.to_sparse())
o = torch.optim.SGD(m.parameters(), 0.1)
X = torch.randn(10, 4)
for e in range(3):
    l = m(X).square().mean()
    o.zero_grad()
    l.backward()
    o.step()
    print(e, f"{l.item():.4f}")
torch.save({"w": m.l.weight.detach()}, "model.pt")
