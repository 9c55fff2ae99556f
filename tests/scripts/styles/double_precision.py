"""Everything in float64, set as the default dtype."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(60)
net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
x = torch.rand(25, 2)
y = (x[:, :1] - x[:, 1:]).exp()
for step in range(6):
    loss = (net(x) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), loss.dtype)
