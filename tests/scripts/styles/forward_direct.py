"""Calls model.forward() and nn.Module.forward of a part by hand, past __call__."""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10), nn.Linear(10, 2)

    def forward(self, x):
        return self.fc2.forward(torch.relu(self.fc1.forward(x)))


torch.manual_seed(67)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(12, 6), torch.randint(2, (12,))
for step in range(6):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net.forward(x), y)
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
