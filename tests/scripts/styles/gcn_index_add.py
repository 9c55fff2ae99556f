"""A graph convolution over an edge list, aggregated with index_add_."""
import torch
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.lin = nn.Linear(n_in, n_out)

    def forward(self, x, edges):
        src, dst = edges
        messages = self.lin(x)[src]
        out = torch.zeros(x.size(0), messages.size(1), dtype=messages.dtype)
        out.index_add_(0, dst, messages)
        degree = torch.bincount(dst, minlength=x.size(0)).clamp(min=1)
        return out / degree[:, None]


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = GraphConv(8, 16), GraphConv(16, 3)

    def forward(self, x, edges):
        return self.c2(torch.relu(self.c1(x, edges)), edges)


torch.manual_seed(31)
n = 20
edges = torch.randint(n, (2, 60))
edges = torch.cat([edges, torch.arange(n).expand(2, n)], 1)
x, y = torch.randn(n, 8), torch.randint(3, (n,))
mask = torch.rand(n) < 0.6
model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
for epoch in range(6):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x, edges)[mask], y[mask])
    loss.backward()
    optimizer.step()
    print(epoch, loss.item().hex())
