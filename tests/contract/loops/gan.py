"""Two models, two optimizers, each model called several times a step."""

import torch
from torch import nn

call = globals().get("call", lambda module, *args: module(*args))
fused = globals().get("fused")

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
to_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999), fused=fused)
to_d = torch.optim.SGD(discriminator.parameters(), lr=2e-2, momentum=0.9, fused=fused)
criterion = nn.BCEWithLogitsLoss()
one, zero = torch.ones(16, 1), torch.zeros(16, 1)

losses = []
for _ in range(20):
    real, noise = torch.randn(16, 8), torch.randn(16, 4)
    fake = call(generator, noise)
    to_d.zero_grad()
    loss_d = criterion(call(discriminator, real), one)
    loss_d = loss_d + criterion(call(discriminator, fake.detach()), zero)
    loss_d.backward()
    to_d.step()
    to_g.zero_grad()
    loss_g = criterion(call(discriminator, fake), one)
    loss_g.backward()
    to_g.step()
    losses += [loss_d.item(), loss_g.item()]

result = {**generator.state_dict(), **{f"d.{k}": v for k, v in discriminator.state_dict().items()}}
