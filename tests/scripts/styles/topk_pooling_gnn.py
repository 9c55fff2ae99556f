"""A batch of graphs by block-diagonal adjacency, top-k pooling with a gate, mean read-out."""
import torch
from torch import nn


class Pool(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.score = nn.Linear(d, 1)

    def forward(self, h, batch, n_graphs, k):
        s = self.score(h).squeeze(1)
        keep = torch.cat([(batch == g).nonzero().squeeze(1)[s[batch == g].topk(k).indices] for g in range(n_graphs)])
        return h[keep] * torch.tanh(s[keep])[:, None], batch[keep], keep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.pool, self.l2 = nn.Linear(4, 12), Pool(12), nn.Linear(12, 2)

    def forward(self, x, adj, batch, n_graphs):
        h = torch.relu(adj @ self.l1(x).float())
        h, kept, _ = self.pool(h, batch, n_graphs, 3)
        return self.l2(torch.stack([h[kept == g].mean(0) for g in range(n_graphs)]))


torch.manual_seed(100)
sizes = [4, 5, 6, 4]
adj = torch.block_diag(*(torch.softmax(torch.randn(n, n), 1) for n in sizes))
batch = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
x, y = torch.randn(sum(sizes), 4), torch.tensor([0, 1, 1, 0])
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(5):
    loss = nn.functional.cross_entropy(net(x, adj, batch, 4), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
