"""Weights in nn.ParameterList and ParameterDict, products written by hand."""
import torch
from torch import nn
import torch.nn.functional as F


class HandNet(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(b, a) * a**-0.5) for a, b in zip(sizes, sizes[1:])
        )
        self.extra = nn.ParameterDict({"gain": nn.Parameter(torch.ones(1)), "bias": nn.Parameter(torch.zeros(sizes[-1]))})

    def forward(self, x):
        for w in self.weights[:-1]:
            x = torch.relu(torch.einsum("bi,oi->bo", x, w))
        return F.linear(x, self.weights[-1], self.extra["bias"]) * self.extra["gain"]


torch.manual_seed(10)
net = HandNet([5, 12, 12, 2])
opt = torch.optim.Adagrad(net.parameters(), lr=0.05)
x, y = torch.randn(20, 5), torch.randn(20, 2)
for step in range(6):
    loss = F.smooth_l1_loss(net(x), y)
    net.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item().hex())
print(net.extra["gain"].item().hex())
