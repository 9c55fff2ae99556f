"""What forward writes to its modules in some calls only, by values that no code names."""
import torch
from torch import nn


class Counts(nn.Module):
    """Counts rows that don't occur in the first calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("hot", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.hot += (x.abs() > 50).any(1).sum()
        return self.linear(x)


class Keeps(Counts):
    """Keeps what has rows from time to time, and a mask whenever it has another size."""

    def __init__(self):
        super().__init__()
        self.share, self.features, self.mask = 0.0, torch.zeros(2, 4), torch.zeros(1)

    def forward(self, x):
        self.share += 0.15
        if self.share % 0.6 < 0.15:
            self.features = x.tanh().detach()
        if self.mask.numel() != int(10 * self.share):
            self.mask = torch.ones(int(10 * self.share))
        return super().forward(x) + self.mask.mean()


torch.manual_seed(3)
for kind in (Counts, Keeps):
    net = kind()
    opt = torch.optim.SGD(net.parameters(), lr=1e-6)
    for at in range(14):
        x = torch.randn(8, 4)
        if at > 9:
            x[4:] *= 1000
        loss = net(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        kept = vars(net).get("features", x)
        print(f"{kind.__name__} {at} loss {loss.item():.6g} {net.hot.item()} {tuple(kept.shape)}")
        print(f"{kept.sum().item():.6g}")
torch.save(net.state_dict(), "model.pt")
