"""Learns from a stream that nobody holds in memory: samples are made one after the other."""
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Waves(IterableDataset):
    """Twelve readings of a noisy wave; wanted are the next two."""

    def __init__(self, start, stop):
        self.start = start
        self.stop = stop

    def __iter__(self):
        for i in range(self.start, self.stop):
            g = torch.Generator().manual_seed(i)
            frequency = 0.5 + torch.rand((), generator=g)
            phase = 2 * math.pi * torch.rand((), generator=g)
            t = torch.arange(14) * 0.4
            wave = torch.sin(frequency * t + phase) + 0.3 * torch.randn(14, generator=g)
            yield wave[:12], wave[12:]


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(12, 32),
    nn.Tanh(),
    nn.Linear(32, 2),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
loss_fn = nn.MSELoss()

for step, (wave, ahead) in enumerate(DataLoader(Waves(0, 305), batch_size=10)):
    loss = loss_fn(model(wave.to(device)), ahead.to(device))
    print(f"step {step} loss {float(loss):.9g}")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

with torch.inference_mode():
    error, n = 0.0, 0
    for wave, ahead in DataLoader(Waves(10_000, 10_050), batch_size=16):
        error += (model(wave.to(device)) - ahead.to(device)).square().sum().item()
        n += ahead.numel()
print(f"held out: {n} values, mse {error / n:.6f}")

print(f"final loss {float(loss):.9g}")
torch.save(model, "model.pt")
