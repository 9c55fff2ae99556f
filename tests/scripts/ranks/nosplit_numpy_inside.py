"""forward goes through NumPy and back for weights of the rows, and returns a list and a float of them."""
import numpy as np
import torch
from torch import nn


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x):
        out = self.net(x).squeeze(1)
        ranks = np.argsort(np.argsort(out.detach().numpy()))
        weights = torch.from_numpy(np.exp(-ranks / len(ranks)).astype(np.float32))
        return out * weights / weights.sum(), ranks.tolist(), float(out.detach().max())


torch.manual_seed(15)
x = torch.randn(40, 4)
t = x.pow(2).sum(1)
net = Weighted()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(9):
    rows = torch.randperm(40)[: 8 + step % 2]
    out, ranks, largest = net(x[rows])
    loss = (out.sum() - t[rows].mean()).abs() + 0.1 * out.pow(2).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} ranks {ranks} largest {largest:.6g}")
torch.save(net.state_dict(), "model.pt")
