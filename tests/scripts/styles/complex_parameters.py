"""A Fourier layer with complex weights."""
import torch
from torch import nn


class SpectralConv(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x):
        f = torch.fft.rfft(x.float())
        out = torch.zeros_like(f)
        out[..., : self.modes] = torch.einsum("bim,iom->bom", f[..., : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.size(-1))


class FNO(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.spec, self.local = nn.Conv1d(1, 6, 1), SpectralConv(6, 4), nn.Conv1d(6, 6, 1)
        self.down = nn.Conv1d(6, 1, 1)

    def forward(self, x):
        h = self.up(x)
        return self.down(torch.nn.functional.gelu(self.spec(h) + self.local(h)))


torch.manual_seed(58)
model = FNO()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(8, 1, 16)
y = x.cumsum(-1) / 4
for step in range(5):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
