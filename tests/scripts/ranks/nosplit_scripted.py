"""Models by torch.jit: one is scripted, with a buffer that it counts up, and one is traced."""
import warnings

import torch
from torch import nn
from torch.nn import functional as F

warnings.simplefilter("ignore")  # TorchScript is deprecated
torch.manual_seed(0)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1.0)
        hidden = torch.relu(self.first(x))
        if hidden.sum() > 1e9:
            hidden = hidden * 2
        return self.second(hidden) + 0.01 * self.calls


x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
scripted = torch.jit.script(Scripted())
traced = torch.jit.trace(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), x[:4])
opt = torch.optim.SGD([*scripted.parameters(), *traced.parameters()], lr=0.1)
for epoch in range(4):
    for at in range(0, 32, 8):
        out = scripted(x[at : at + 8]) + traced(x[at : at + 8])
        loss = F.cross_entropy(out, y[at : at + 8])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item(), scripted.calls.item())
torch.save([scripted.state_dict(), traced.state_dict()], "model.pt")
