"""Quantization-aware training by fake quantization with a learned range."""
import torch
from torch import nn


class FakeQuant(nn.Module):
    def __init__(self, bits=8):
        super().__init__()
        self.levels = 2 ** (bits - 1) - 1
        self.register_buffer("amax", torch.tensor(0.0))

    def forward(self, x):
        if self.training:
            self.amax.copy_(torch.maximum(self.amax * 0.9, x.detach().abs().max()))
        scale = self.amax.clamp(min=1e-6) / self.levels
        q = (x / scale).round().clamp(-self.levels, self.levels) * scale
        return x + (q - x).detach()


class QLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.wq, self.xq = FakeQuant(4), FakeQuant(8)

    def forward(self, x):
        return nn.functional.linear(self.xq(x), self.wq(self.weight), self.bias)


torch.manual_seed(35)
model = nn.Sequential(QLinear(6, 16), nn.ReLU(), QLinear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
x, y = torch.randn(20, 6), torch.randint(2, (20,))
for step in range(6):
    model.train()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), model[0].wq.amax.item().hex())
