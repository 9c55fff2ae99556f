"""Two losses on one trunk, each with a backward pass of its own over the same graph."""
import torch
from torch import nn

from by_hand import autocast, scaler


class TwoHeaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.ELU(), nn.Linear(24, 24), nn.ELU())
        self.left = nn.Linear(24, 2)
        self.right = nn.Linear(24, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.left(h), self.right(h)


torch.manual_seed(13)
model = TwoHeaded()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8, weight_decay=1e-3)
norms = []
for step in range(30):
    x = torch.randn(12, 6)
    labels = (x[:, 0] > 0).long()
    values = x[:, 1:2] * x[:, 2:3]
    if step in (3, 17):
        values = values * 20000
    with autocast():
        a, b = model(x)
    a, b = a.float(), b.float()
    loss_a = nn.functional.cross_entropy(a, labels)
    loss_b = nn.functional.huber_loss(b, values, delta=10.0) + b.square().mean()
    optimizer.zero_grad()
    scaler.scale(loss_a).backward(retain_graph=True)
    norms.append((model.trunk[0].weight.grad / scaler.get_scale()).norm().item())  # of the first loss alone
    scaler.scale(loss_b).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss_a.item(), loss_b.item(), norms[-1])

print(f"final loss {(loss_a + loss_b).item():.9g}")
scaler.report()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
