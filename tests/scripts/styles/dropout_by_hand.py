"""Dropout, stochastic depth and mixup with a generator of the script's own."""
import torch
from torch import nn

gen = torch.Generator().manual_seed(690)


def dropout(x, p, training):
    if not training:
        return x
    keep = torch.rand(x.shape, generator=gen) >= p
    return x * keep / (1 - p)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        h = dropout(torch.relu(self.first(x)), 0.2, self.training)
        for block in self.blocks:
            if self.training and torch.rand((), generator=gen).item() < 0.3:
                continue
            h = h + torch.relu(block(h))
        return self.last(h)


torch.manual_seed(69)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(16, 5), torch.randint(3, (16,))
for step in range(6):
    lam = 0.5 + 0.5 * torch.rand((), generator=gen).item()
    perm = torch.randperm(16, generator=gen)
    out = net(lam * x + (1 - lam) * x[perm])
    loss = lam * nn.functional.cross_entropy(out, y) + (1 - lam) * nn.functional.cross_entropy(out, y[perm])
    for p in net.parameters():
        p.grad = None
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
net.eval()
print(net(x).double().sum().item().hex())
