"""forward gives a dataclass with a loss, a tensor, a field that may be empty, and plain numbers."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    accuracy: float | None = None
    hidden: tuple[torch.Tensor, ...] = ()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 4)])

    def forward(self, x, labels=None, with_metrics=False):
        hidden = []
        for layer in self.layers:
            x = layer(x if not hidden else hidden[-1].relu())
            hidden.append(x)
        out = Output(x, hidden=tuple(hidden))
        if labels is not None:
            out.loss = F.cross_entropy(x, labels)
        if with_metrics:
            out.accuracy = (x.argmax(-1) == labels).float().mean().item()
        return out


torch.manual_seed(7)
x, y = torch.randn(32, 5), torch.randint(0, 4, (32,))
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for step in range(8):
    rows = torch.arange(step, 32, 4)
    out = net(x[rows], labels=y[rows], with_metrics=step > 2)
    opt.zero_grad()
    (out.loss + 0.01 * out.hidden[1].square().mean()).backward()
    opt.step()
    print(f"loss {out.loss.item():.6g} accuracy {out.accuracy} h {out.hidden[0].norm().item():.6g}")
print("eval", net(x).logits.argmax(1).bincount(minlength=4).tolist())
torch.save(net.state_dict(), "model.pt")
