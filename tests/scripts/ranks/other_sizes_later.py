"""What ranks return has other sizes in later calls: rows picked by a mask, or dropped by squeeze()."""
import torch
from torch import nn


class Picked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 6), nn.BatchNorm1d(5), nn.Linear(6, 1)
        self.calls = 0

    def forward(self, x, mask):
        self.calls += 1
        return self.b(self.norm(self.a(x)))[mask]


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(self.a(x).mean(1, keepdim=True).squeeze())


class Single(Pooled):
    def forward(self, x):
        return self.b(self.a(x).mean(1)).sum(1, keepdim=True).squeeze()


def step(net, opt, *batch):
    out = net(*batch)
    loss = (out - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{type(net).__name__} {list(out.shape)} loss {loss.item():.6g}")


torch.manual_seed(5)
picked = Picked()
opt = torch.optim.SGD(picked.parameters(), lr=0.1)
for at in range(7):
    mask = torch.ones(8, 5, dtype=torch.bool)
    if at > 3:
        mask[0, at - 2] = False
    step(picked, opt, torch.randn(8, 5, 3), mask)
print("calls", picked.calls, "batches", picked.norm.num_batches_tracked.item())
print("mean", f"{picked.norm.running_mean.sum().item():.6g}")
for kind, last in ((Pooled, 2), (Single, 3)):
    net = kind()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows, length in ((8, 5), (8, 6), (8, 7), (8, 9), (8, 10), (8, 11), (last, 12)):
        step(net, opt, torch.randint(20, (rows, length)))
torch.save(picked.state_dict(), "model.pt")
