"""One network is called several times a step: with 9, 4, 2 and 1 rows, and with one bare sample."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(139)
x = torch.randn(50, 4)
net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
opt = torch.optim.ASGD(net.parameters(), lr=0.1)
for step in range(6):
    a, b, c, d = x[torch.randperm(50)[:16]].split([9, 4, 2, 1])
    anchors, others, pair, single = net(a), net(b), net(c), net(d)
    sample = net(x[step])
    with torch.no_grad():
        empty = net(x[:0])
    spread = torch.cdist(anchors, others).min(1).values.mean()
    loss = spread + (pair[0] - pair[1]).norm() + single.pow(2).sum() + F.softplus(sample).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"spread {spread.item():.6g} loss {loss.item():.6g} sample {sample[0].item():.6g} "
          f"shapes {tuple(sample.shape)} {tuple(empty.shape)} g {net[2].bias.grad.norm():.6g}")
torch.save(net.state_dict(), "model.pt")
