"""VQ-VAE: the codebook is a buffer that forward moves by counts and sums of the batch's codes."""
import torch
import torch.nn.functional as F
from torch import nn


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 3), nn.Linear(3, 4)
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x):
        z = self.enc(x)
        index = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, 5).float()
                self.counts.mul_(0.8).add_(hot.sum(0), alpha=0.2)
                moved = (hot.T @ z) / hot.sum(0).clamp(min=1)[:, None]
                self.codes = torch.where(hot.any(0)[:, None], self.codes.lerp(moved, 0.3), self.codes)
        q = self.codes[index]
        return self.dec(z + (q - z).detach()), 0.25 * F.mse_loss(z, q), index


torch.manual_seed(13)
x = torch.randn(40, 4)
net = Quantizer()
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for step in range(10):
    rows = torch.randperm(40)[:9]
    back, commit, index = net(x[rows])
    loss = F.mse_loss(back, x[rows]) + commit
    opt.zero_grad()
    loss.backward()
    opt.step()
    perplexity = (index.bincount(minlength=5) / len(index) + 1e-9).log().neg().exp().min()
    print(f"loss {loss.item():.6g} commit {commit.item():.6g} codes {index.unique().numel()} "
          f"counts {net.counts.max():.6g} {perplexity:.6g}")
torch.save(net.state_dict(), "model.pt")
