"""A vector-quantized autoencoder: straight-through codes, codebook by moving averages."""
import torch
from torch import nn
import torch.nn.functional as F


class VectorQuantizer(nn.Module):
    def __init__(self, k, d, decay=0.8):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(k, d))
        self.register_buffer("count", torch.ones(k))
        self.register_buffer("total", self.codes.clone())

    def forward(self, z):
        index = torch.cdist(z.float(), self.codes).argmin(1)
        q = self.codes[index]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, len(self.codes)).float()
                self.count.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(hot.T @ z.float(), alpha=1 - self.decay)
                self.codes.copy_(self.total / self.count[:, None].clamp(min=1e-3))
        return z + (q - z).detach(), F.mse_loss(z, q.detach()), index


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 3), nn.Linear(3, 8)
        self.vq = VectorQuantizer(6, 3)

    def forward(self, x):
        q, commit, index = self.vq(self.enc(x))
        return self.dec(q), commit, index


torch.manual_seed(75)
model = VQVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(6):
    x = torch.randn(16, 8)
    out, commit, index = model(x)
    loss = F.mse_loss(out, x) + 0.25 * commit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), index.unique().numel() > 0)
