"""forward gives a named tuple of lists, a scalar, a repeated tensor, a view of a parameter, and text."""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Out(NamedTuple):
    states: list
    pair: tuple
    scale: torch.Tensor
    note: str
    table: torch.Tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.scale, self.table = nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        states = [x]
        for cell in self.cells:
            states.append(torch.tanh(cell(states[-1])) * self.scale)
        logits = states[-1] @ self.table.t()
        return Out(states, (logits, logits), self.scale, "ok", self.table[:2])


torch.manual_seed(73)
x, y = torch.randn(30, 5), torch.randint(0, 4, (30,))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(8):
    rows = torch.arange(step, 30, 4)
    out = net(x[rows])
    first, second = out.pair
    loss = F.cross_entropy(first, y[rows]) + 0.1 * second.logsumexp(1).mean()
    loss = loss + 0.01 * sum(s.abs().max() for s in out.states[1:]) + 0.1 * (out.scale - 2) ** 2
    loss = loss + 0.05 * out.table.pow(2).sum() + (first - second).abs().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{out.note} loss {loss.item():.6g} scale {out.scale.item():.6g} same {first is second} "
          f"x {out.states[0] is x} g {net.table.grad.norm():.6g}")
torch.save(net.state_dict(), "model.pt")
