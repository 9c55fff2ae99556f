"""An exponential moving average of weights in a dict, swapped in to evaluate."""
import torch
from torch import nn


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.backup = {}

    def update(self):
        for name, param in self.model.named_parameters():
            self.shadow[name].lerp_(param.detach(), 1 - self.decay)

    def __enter__(self):
        for name, param in self.model.named_parameters():
            self.backup[name] = param.data
            param.data = self.shadow[name]

    def __exit__(self, *exc):
        for name, param in self.model.named_parameters():
            param.data = self.backup[name]


torch.manual_seed(21)
model = nn.Sequential(nn.Linear(3, 10), nn.Mish(), nn.Linear(10, 2))
ema = EMA(model, 0.8)
opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
x, y = torch.randn(20, 3), torch.randint(2, (20,))
criterion = nn.CrossEntropyLoss()
for step in range(6):
    loss = criterion(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.update()
    with ema, torch.no_grad():
        averaged = criterion(model(x), y)
    print(step, loss.item().hex(), averaged.item().hex())
