"""Complex numbers inside and out: an FFT layer with complex weights, a complex output, sizes by T."""
import torch
from torch import nn


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, 5, dtype=torch.cfloat) * 0.3)
        self.skip = nn.Conv1d(2, 2, 1)

    def forward(self, x):
        spectrum = torch.einsum("bil,oil->bol", torch.fft.rfft(x)[..., :5], self.weight)
        return torch.fft.irfft(spectrum, n=x.size(-1)) + self.skip(x), spectrum


torch.manual_seed(199)
x = torch.randn(30, 2, 16).cumsum(-1)
model = Spectral()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(8):
    rows = torch.randperm(30)[: 6 + step % 2]
    out, spectrum = model(x[rows])
    loss = (out - x[rows].roll(1, -1)).pow(2).mean() + 1e-3 * spectrum.abs().mean(0).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} power {spectrum.abs().pow(2).sum().item():.6g} "
          f"phase {spectrum[0, 0, 1].angle().item():.6g} g {model.weight.grad.abs().sum():.6g}")
torch.save(model.state_dict(), "model.pt")
