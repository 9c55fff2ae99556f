"""Folds: each makes a new model, a new bare temperature that it uses, and a new optimizer."""
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.layer, self.shared = nn.Linear(4, 3), shared

    def forward(self, x):
        return self.layer(x) * self.shared["temperature"].exp()


torch.manual_seed(149)
x, y = torch.randn(36, 4), torch.randint(3, (36,))


def fold(k):
    shared = {"temperature": nn.Parameter(torch.tensor([0.1]))}
    net = Net(shared)
    opt = torch.optim.SGD([*net.parameters(), shared["temperature"]], lr=0.3)
    train = torch.tensor([i for i in range(36) if i % 4 != k])
    for epoch in range(2):
        for rows in train[torch.randperm(27)].split(9):
            loss = F.cross_entropy(net(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
    print(f"fold {k} loss {loss.item():.6g} temperature {shared['temperature'].item():.6g}")
    return net.state_dict(), shared["temperature"]


torch.save([fold(k) for k in range(4)], "model.pt")
