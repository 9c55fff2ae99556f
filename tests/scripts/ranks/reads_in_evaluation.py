"""Models that read numbers in inference mode, or by torch.equal, and branch for all rows when one is far off."""
import torch
from torch import nn


class Bounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x):
        out = self.a(x)
        return out * 2 if x.max() > 100 else out


class Clipped(Bounded):
    def forward(self, x):
        out = self.a(x)
        return out if torch.equal(x, x.clamp(max=100)) else out * 2


torch.manual_seed(23)
bounded, clipped = Bounded(), Clipped()
for step in range(1, 10):
    x = torch.randn(8, 4)
    if step in (6, 7):  # not in a call that is verified
        x[-1, 0] = 200
    with torch.inference_mode():
        one = bounded(x).abs().sum().item()
    with torch.no_grad():
        other = clipped(x).abs().sum().item()
    print(f"bounded {one:.6g} clipped {other:.6g}")
torch.save(nn.ModuleList((bounded, clipped)).state_dict(), "model.pt")
