"""Stochastic depth by one draw a call, DropPath by a draw a row, and dropout2d."""
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = F.dropout2d(self.first(x), 0.2, self.training)
        for block in self.blocks:
            if self.training and torch.rand(1).item() < 0.4:
                continue
            keep = (torch.rand(len(x), 1, 1, 1) < 0.8).float() / 0.8 if self.training else 1.0
            h = h + keep * torch.relu(block(h))
        return self.head(h.mean((2, 3)))


torch.manual_seed(227)
x, y = torch.randn(30, 1, 5, 5), torch.randint(0, 3, (30,))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(10):
    rows = torch.arange(step, 30, 4)
    loss = F.cross_entropy(net(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.6g} rows {len(rows)}")
torch.save(net.state_dict(), "model.pt")
