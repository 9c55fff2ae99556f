"""Channels first and the batch in the second dimension, of the inputs and of the outputs."""
import torch
from torch import nn


class Mixer(nn.Module):
    """Takes (channels, batch, length), gives (channels, batch) and (batch,)."""

    def __init__(self):
        super().__init__()
        self.mix, self.along = nn.Parameter(torch.randn(4, 3) * 0.5), nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x):
        h = self.norm(torch.einsum("oc,cbl->obl", self.mix, self.along(x)))
        return h.relu().sum(-1), h.amax((0, 2))


torch.manual_seed(167)
data = torch.randn(3, 40, 7)
target = data.std((0, 2))
model = Mixer()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(9):
    size = 3 if step == 4 else 7 if step == 6 else 8  # also as many as channels, as steps
    at = torch.randperm(40)[:size]
    sums, largest = model(data[:, at])
    loss = (sums.mean(0) - target[at]).pow(2).mean() + 0.1 * (largest - 1).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{tuple(sums.shape)} loss {loss.item():.6g} spread {sums.std(1).sum().item():.6g} "
          f"g {model.mix.grad.norm():.6g}")
torch.save(model.state_dict(), "model.pt")
