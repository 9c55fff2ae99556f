"""Manifold mixup in forward: rows are mixed with rows of a permutation that a generator of its own draws."""
import torch
import torch.nn.functional as F
from torch import nn


class Mixup(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x, labels):
        h, target = torch.tanh(self.a(x)), F.one_hot(labels, 3).float()
        if self.training:
            perm = torch.randperm(len(x), generator=self.generator)
            h, target = 0.7 * h + 0.3 * h[perm], 0.7 * target + 0.3 * target[perm]
        return self.b(h), target


torch.manual_seed(12)
x, y = torch.randn(36, 5), torch.randint(0, 3, (36,))
net = Mixup()
opt = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(9):
    rows = torch.randperm(36)[:8]
    out, target = net(x[rows], y[rows])
    loss = -(target * out.log_softmax(1)).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} target {target.max(1).values.sum().item():.6g}")
net.eval()
print(f"eval {F.cross_entropy(*net(x, y)).item():.6g}")
torch.save(net.state_dict(), "model.pt")
