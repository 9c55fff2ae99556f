"""A module whose __call__ is its own: it counts and reshapes around forward."""
import torch
from torch import nn


class Counted(nn.Module):
    calls = 0

    def __call__(self, x, *, scale=1.0):
        type(self).calls += 1
        out = super().__call__(x.flatten(1))
        return out * scale


class Net(Counted):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 10)
        self.b = nn.Linear(10, 2)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


torch.manual_seed(7)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(10, 3, 4), torch.randint(0, 2, (10,))
for i in range(6):
    loss = nn.functional.cross_entropy(net(x, scale=0.5), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(i, loss.item().hex())
print("calls", Net.calls)
