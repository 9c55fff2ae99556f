"""ActNorm: its first batch gives it its parameters, written through .data, which counts no version."""
import math

import torch
from torch import nn


class ActNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x):
        if not self.ready:
            self.shift.data.copy_(-x.mean(0))
            self.scale.data.copy_(1 / (x.std(0) + 1e-6))
            self.ready.fill_(1)
        return (x + self.shift) * self.scale, self.scale.abs().log().sum()


class Flow(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList([ActNorm(width) for _ in range(2)])
        self.mix = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x):
        log_det = 0.0
        for norm, mix in zip(self.norms, self.mix):
            x, more = norm(x)
            log_det = log_det + more
            x = x + 0.1 * torch.tanh(mix(x))
        return x, log_det


torch.manual_seed(3)
flow = Flow(4)
optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(22, 4) * torch.tensor([1.0, 2.0, 0.5, 3.0]) + 1
    z, log_det = flow(x)
    loss = (0.5 * (z**2).sum(1) + 2 * math.log(2 * math.pi)).mean() - log_det
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.6f}")
print(*(f"{p.detach().norm():.6f}" for p in flow.parameters()))
torch.save(flow.state_dict(), "model.pt")
