"""The model is never called: encode() and decode(), a submodule, forward by its name, F.linear of a weight."""
import torch
import torch.nn.functional as F
from torch import nn


class Auto(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 3), nn.Linear(3, 6)
        self.register_buffer("shift", torch.zeros(6))

    def encode(self, x):
        return torch.tanh(self.enc(x - self.shift))

    def decode(self, z):
        return F.linear(z, self.enc.weight.t()) + self.dec(z) + self.shift

    def forward(self, x):
        return self.decode(self.encode(x))


torch.manual_seed(191)
data = torch.randn(36, 6).cumsum(1)
auto = Auto()
auto.shift.copy_(data.mean(0))
opt = torch.optim.Adam(auto.parameters(), lr=0.02)
for step in range(9):
    x = data[torch.randperm(36)[:7]]
    if step % 3 == 0:
        back = auto.decode(auto.encode(x))
    elif step % 3 == 1:
        back = auto.forward(x)
    else:
        back = auto.dec(auto.encode(x)) + auto.shift
    loss = F.smooth_l1_loss(back, x) + 0.01 * auto.enc.weight.abs().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    r2 = 1 - (back - x).pow(2).sum() / (x - x.mean(0)).pow(2).sum()
    print(f"loss {loss.item():.6g} r2 {r2.item():.6g} g {auto.enc.weight.grad.norm():.6g}")
torch.save(auto.state_dict(), "model.pt")
