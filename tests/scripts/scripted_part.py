"""A model with one part in TorchScript, as research code of some years ago has it."""
import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore", category=DeprecationWarning)


class Gate(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.value = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            x = x.unsqueeze(0)
        return self.value(x) * torch.tanh(self.gate(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 16)
        self.gate = torch.jit.script(Gate(16))
        self.outer = nn.Linear(16, 2)

    def forward(self, x):
        return self.outer(self.gate(torch.relu(self.inner(x))))


torch.manual_seed(19)
net = Net()
optim = torch.optim.Adam(net.parameters(), lr=3e-3)
for i in range(24):
    x = torch.randn(16, 6)
    y = torch.stack([x[:, 0] ** 2, x[:, 1] * x[:, 2]], 1)
    if i == 7:
        y = y * 1e6
    loss = nn.functional.mse_loss(net(x), y)
    optim.zero_grad()
    loss.backward()
    optim.step()
    if i % 6 == 0:
        print(i, loss.item())

print(f"final loss {loss.item():.9g}")
torch.save({"net": net.state_dict(), "optim": optim.state_dict()}, "model.pt")
