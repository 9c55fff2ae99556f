"""A model that writes to a dict outside of itself in its first call, and is split after it."""

import torch
from torch import nn

SEEN: dict[str, int] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.setdefault("rows", len(x))
        return self.linear(x)


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(8):
    loss = net(torch.randn(6, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")
