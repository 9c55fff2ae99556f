"""NumPy draws the noise inside of forward."""
import numpy as np
import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, x):
        h = torch.relu(self.a(x))
        if self.training:
            h = h + torch.from_numpy(np.random.normal(0, 0.1, h.shape).astype(np.float32))
        return self.b(h)


np.random.seed(68)
torch.manual_seed(68)
model = Noisy()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(15, 3)
for step in range(6):
    loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
