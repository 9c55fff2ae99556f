"""An encoder that is an Identity, whose output the script changes in place."""

import torch
from torch import nn

torch.manual_seed(0)


class Enc(nn.Module):
    def __init__(s, i):
        super().__init__()
        s.f = nn.Identity() if i else nn.Linear(4, 4)
        s.g = nn.Parameter(torch.ones(4))

    def forward(s, x):
        h = s.f(x)
        return h if isinstance(s.f, nn.Identity) else h * s.g


a, b = Enc(True), Enc(False)
o = torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1)
X = torch.randn(16, 4)
for e in range(6):
    x = X.clone()
    h = a(x)
    h -= h.mean(0)
    h /= h.std(0) + 1e-5  # normalises x too, as h is x
    l = (b(x) - x.roll(1, 1)).square().mean()
    o.zero_grad()
    l.backward()
    o.step()
    print(e, f"{l.item():.5f} {x.mean().abs().item():.4f}", h is x)
torch.save({**{"a" + k: v for k, v in a.state_dict().items()}, **b.state_dict()}, "model.pt")
