"""Redundancy reduction: a projector with BatchNorm, both views in one call, a loss over the batch."""
import torch
from torch import nn

torch.manual_seed(0)
data = torch.randn(40, 8)
net = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5, bias=False))
last = nn.BatchNorm1d(5, affine=False)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for epoch in range(2):
    for rows in torch.randperm(40).split(11):
        x = data[rows]
        a, b = net(torch.cat([x + 0.1 * torch.randn_like(x), x * 1.1])).chunk(2)
        c = last(a).T @ last(b) / len(x)
        on = (c.diagonal() - 1).pow(2).sum()
        off = (c - torch.diag(c.diagonal())).pow(2).sum()
        loss = on + 0.05 * off
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"on {on.item():.6g} off {off.item():.6g} mean {net[1].running_mean[0]:.6g}")
net.eval(), last.eval()
with torch.no_grad():
    print(f"eval {last(net(data)).norm().item():.6g}")
torch.save([net.state_dict(), last.state_dict()], "model.pt")
