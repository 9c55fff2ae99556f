"""A flag of the model, set in the middle of training, has forward centre its features by batch."""
import torch
from torch import nn


class Net(nn.Module):
    centre = False  # of the class, and later of the object

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)
        self.temperature = 1.0

    def forward(self, x):
        h = torch.relu(self.a(x)) / self.temperature
        if self.centre:
            h = h - h.mean(0)
        return self.b(h)


torch.manual_seed(0)
x = torch.randn(40, 3)
t = x.abs().sum(1, keepdim=True)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(11):
    if step == 4:
        net.centre = True
    if step == 9:
        net.centre = False
    net.temperature *= 1.05
    rows = torch.arange(step, 40, 5)
    out = net(x[rows])
    loss = (out - t[rows]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.6g} mean {out.mean().item():.6g} std {out.std().item():.6g}")
torch.save(net.state_dict(), "model.pt")
