"""Domain-adversarial training by a gradient reversal function."""
import torch
from torch import nn
import torch.nn.functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.label, self.domain = nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x, strength):
        h = self.features(x)
        return self.label(h), self.domain(Reverse.apply(h, strength))


torch.manual_seed(85)
model = DANN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source, target = torch.randn(12, 4), torch.randn(12, 4) + 1
y = (source.sum(1) > 0).long()
for step in range(6):
    s = step / 6
    label, dom_s = model(source, s)
    _, dom_t = model(target, s)
    loss = F.cross_entropy(label, y) + F.cross_entropy(dom_s, torch.zeros(12).long()) + F.cross_entropy(dom_t, torch.ones(12).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
