"""SAM: up by the gradient, again, and back down; BatchNorm's statistics kept out of the second pass."""
import torch
import torch.nn.functional as F
from torch import nn


class Sam:
    def __init__(self, params, base, rho):
        self.params, self.base, self.rho, self.moved = list(params), base, rho, {}

    @torch.no_grad()
    def up(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        for p in self.params:
            self.moved[p] = p.grad * (self.rho / (norm + 1e-12))
            p.add_(self.moved[p])
        return norm

    @torch.no_grad()
    def down(self):
        for p in self.params:
            p.sub_(self.moved[p])
        self.base.step()


torch.manual_seed(127)
x, y = torch.randn(36, 6), torch.randint(0, 3, (36,))
net = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
sam = Sam(net.parameters(), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), 0.2)
for epoch in range(2):
    for rows in torch.randperm(36).split(10):
        losses = []
        for again in range(2):
            net[1].momentum = 0.0 if again else 0.1
            loss = F.cross_entropy(net(x[rows]), y[rows])
            net.zero_grad()
            loss.backward()
            norm = sam.down() if again else sam.up()
            losses.append(loss.item())
            print(f"loss {losses[-1]:.6g} norm {norm if norm is None else f'{norm:.6g}'}")
        print(f"sharper {losses[1] - losses[0]:.6g} mean {net[1].running_mean.norm():.6g}")
torch.save(net.state_dict(), "model.pt")
