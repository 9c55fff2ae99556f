"""forward keeps an activation on the model with retain_grad; its gradient is read behind backward."""
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        self.hidden = torch.tanh(self.a(x))
        if self.hidden.requires_grad:
            self.hidden.retain_grad()
        return self.b(self.hidden)


torch.manual_seed(6)
x, y = torch.randn(26, 4), torch.randint(0, 2, (26,))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.2)
importance = torch.zeros(6)
for step in range(9):
    rows = slice(2 * step, 2 * step + 8)
    loss = F.cross_entropy(net(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    importance += (net.hidden * net.hidden.grad).abs().sum(0).detach()
    opt.step()
    print(f"loss {loss.item():.6g} hidden {tuple(net.hidden.shape)} {net.hidden.grad.norm():.6g}")
keep = importance.argsort(descending=True)[:3]
print("kept", keep.tolist(), f"{importance.sum():.6g}")
with torch.no_grad():
    for i in set(range(6)) - set(keep.tolist()):
        net.b.weight[:, i] = 0
    print(f"pruned {F.cross_entropy(net(x), y).item():.6g}")
del net.hidden
torch.save(net.state_dict(), "model.pt")
