"""A graph network: rows are nodes of one graph, and edges between them are an argument of its own."""
import torch
import torch.nn.functional as F
from torch import nn


class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.node = nn.Linear(4, 7), nn.Linear(7, 3), nn.Parameter(torch.randn(10, 4) * 0.1)

    def forward(self, x, edges):
        source, sink = edges
        degree = torch.ones(len(x)).index_add(0, sink, torch.ones(len(sink)))
        h = x + self.node
        for layer in (self.a, self.b):
            h = layer(h)
            h = (h + torch.zeros_like(h).index_add(0, sink, h[source])) / degree[:, None]
            h = torch.tanh(h)
        return h


torch.manual_seed(14)
x, y = torch.randn(10, 4), torch.randint(0, 3, (10,))
net = Gcn()
opt = torch.optim.Adam(net.parameters(), lr=0.03)
for step in range(9):
    edges = torch.randint(0, 10, (2, 10 if step % 2 else 17))
    out = net(x, edges)
    train = torch.arange(10) % 3 != step % 3
    loss = F.cross_entropy(out[train], y[train])
    opt.zero_grad()
    loss.backward()
    opt.step()
    held = (out.argmax(1) == y)[~train].float().mean()
    print(f"loss {loss.item():.6g} held out {held.item():.6g} node {net.node.grad.norm():.6g}")
torch.save(net.state_dict(), "model.pt")
