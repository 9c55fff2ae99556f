"""A perturbation for all inputs, which is a plain attribute, and a list of layers of no module's."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(41)


class Attacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.delta = torch.zeros(6, requires_grad=True)

    def forward(self, x):
        return self.inner(x + self.delta)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.rest = [nn.Linear(8, 8), nn.Linear(8, 3)]

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.rest[1](torch.tanh(self.rest[0](x)))


attacked, hidden = Attacked(), Hidden()
params = [*hidden.parameters(), *(p for layer in hidden.rest for p in layer.parameters())]
opt = torch.optim.SGD(params, lr=0.3)
x, y = torch.randn(16, 6) + (torch.arange(16.0) > 7)[:, None], torch.randint(3, (16,))
for step in range(7):
    loss = F.cross_entropy(attacked(x), y)
    (g,) = torch.autograd.grad(loss, [attacked.delta])
    with torch.no_grad():
        attacked.delta += 0.5 * g
    by_hand = F.cross_entropy(hidden(x), y)
    for p, g in zip(params, torch.autograd.grad(by_hand, params)):
        p.grad = g
    opt.step()
    print(f"loss {loss.item():.6g} by hand {by_hand.item():.6g}")
torch.save({"delta": attacked.delta, "params": params}, "model.pt")
