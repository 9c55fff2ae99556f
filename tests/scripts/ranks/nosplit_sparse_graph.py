"""A graph convolution over all nodes, whose adjacency is dense at first, and sparse later."""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x, adjacency):
        return self.second(adjacency @ F.relu(self.first(adjacency @ x)))


nodes = 30
edges = (torch.rand(nodes, nodes) < 0.1).float()
edges = ((edges + edges.T) > 0).float() + torch.eye(nodes)
scale = edges.sum(1).rsqrt()
adjacency = scale[:, None] * edges * scale[None]
x, y = torch.randn(nodes, 5), torch.randint(0, 3, (nodes,))
known = torch.rand(nodes) < 0.5
net = Convolutions()
opt = torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=5e-4)
for epoch in range(12):
    form = adjacency if epoch < 6 else adjacency.to_sparse()
    out = net(x, form)
    loss = F.cross_entropy(out[known], y[known])
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        right = (net(x, form).argmax(1) == y)[~known].float().mean().item()
    print(epoch, loss.item(), right)
torch.save(net.state_dict(), "model.pt")
