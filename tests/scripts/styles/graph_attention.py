"""A graph attention layer: softmax over edges by scatter_reduce and index_add."""
import torch
from torch import nn
import torch.nn.functional as F


def edge_softmax(scores, dst, n):
    top = torch.full((n,), float("-inf"), dtype=scores.dtype).scatter_reduce(0, dst, scores, "amax")
    e = (scores - top[dst]).exp()
    return e / torch.zeros(n, dtype=e.dtype).index_add(0, dst, e)[dst]


class GAT(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.lin = nn.Linear(n_in, n_out, bias=False)
        self.att = nn.Parameter(torch.randn(2 * n_out) * 0.3)

    def forward(self, x, src, dst):
        h = self.lin(x).float()
        scores = F.leaky_relu(torch.cat([h[src], h[dst]], 1).mul(self.att).sum(1), 0.2)
        alpha = edge_softmax(scores, dst, len(x))
        return torch.zeros_like(h).index_add(0, dst, alpha[:, None] * h[src])


torch.manual_seed(80)
src, dst = torch.randint(15, (2, 50))
src, dst = torch.cat([src, torch.arange(15)]), torch.cat([dst, torch.arange(15)])
x, y = torch.randn(15, 6), torch.randint(3, (15,))
first, second = GAT(6, 8), GAT(8, 3)
optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-2)
for step in range(6):
    loss = F.cross_entropy(second(F.elu(first(x, src, dst)), src, dst), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
