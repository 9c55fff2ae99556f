"""Numbers without rows that forward returns or keeps, equal for all rows in the first calls."""
import torch
import torch.nn.functional as F
from torch import nn


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 20)

    def forward(self, x, y):
        scores = self.b(self.norm(self.a(x)))
        return F.cross_entropy(scores, y), (scores.argmax(-1) == y).float().mean()


class Keeping(Scored):
    def forward(self, x, y):
        loss, self.right = super().forward(x, y)
        return loss


torch.manual_seed(3)
for kind in (Scored, Keeping):
    net = kind()
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    for at in range(8):
        x = torch.randn(8, 6)
        with torch.no_grad():
            scores = net.b(F.batch_norm(net.a(x), None, None, training=True))
        y = scores.argmin(-1)
        if at > 4:
            y[:4] = scores[:4].argmax(-1)
        loss = net(x, y)
        loss, right = loss if isinstance(loss, tuple) else (loss, net.right)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"{kind.__name__} {at} loss {loss.item():.6g} right {right.item():.4g}")
    print(f"mean {net.norm.running_mean.sum().item():.6g}")
torch.save(net.state_dict(), "model.pt")
