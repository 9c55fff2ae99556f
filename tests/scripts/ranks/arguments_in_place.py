"""forward changes its argument in place, and the loop uses what has become of it."""
import numpy as np
import torch
from torch import nn


class Normalising(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x, visits):
        x -= x.mean(1, keepdim=True)
        x /= x.std(1, keepdim=True) + 1e-3
        visits += 1
        return self.out(torch.relu(self.layer(x)))


rng = np.random.default_rng(0)
torch.manual_seed(79)
data = rng.normal(2, 3, (29, 4)).astype(np.float32)
net, visits = Normalising(), torch.zeros(29)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    order = rng.permutation(29)
    for start in range(0, 29, 7):
        rows = order[start : start + 7]
        x, v = torch.from_numpy(data[rows]), visits[rows]
        t = torch.stack([x.sum(1).sin(), x.prod(1).tanh()], 1)
        loss = (net(x, v) - t).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        visits[rows] = v
        print(f"loss {loss.item():.6g} input {x.square().sum():.6g} visits {visits.sum():.6g}")
print(visits.tolist())
torch.save(net.state_dict(), "model.pt")
