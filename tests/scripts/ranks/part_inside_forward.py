"""What forward does inside is decided by the process id and by entropy: other branches, other sizes."""
import os
import zlib

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(4, 5), nn.Linear(5, 2), 0

    def forward(self, x):
        self.calls += 1
        h = self.a(x)
        if zlib.crc32(f"{os.getpid()} {self.calls}".encode()) & 1:
            h = torch.relu(h)
        if os.urandom(1)[0] < 40:
            return self.b(h)[:, :1]
        return self.b(h)


torch.manual_seed(0)
x = torch.randn(60, 4)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(14):
    loss = net(x[step : step + 8]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
