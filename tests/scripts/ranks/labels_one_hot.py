"""Labels and codes as one_hot inside of models: with the number of classes, or counted."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import one_hot


class ConditionalAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(5, 5)

    def forward(self, x, y, noise):
        hot = F.one_hot(y, num_classes=3).float()
        mean, scale = self.encode(torch.cat([x, hot], 1)).chunk(2, 1)
        latent = Normal(mean, scale.exp())
        prior = Normal(torch.zeros_like(mean), 1.0)
        out = self.decode(torch.cat([mean + noise * scale.exp(), hot], 1))
        return out, kl_divergence(latent, prior).sum(1)


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 2), nn.Linear(2, 3)
        self.codes = nn.Parameter(torch.randn(6, 2))

    def forward(self, x):
        h = self.a(x)
        q = one_hot(torch.cdist(h, self.codes).argmin(1), len(self.codes)).to(h) @ self.codes
        return self.b(h + (q - h).detach()), (q - h.detach()).square().sum(1)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x, y):
        hot = F.one_hot(y).float()  # as many as there are in this batch
        return -(self.a(x)[:, : hot.size(1)].log_softmax(1) * hot).sum(1)


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x, y):
        most = F.one_hot(y, 3).sum(0).max().item()
        return self.a(x) / most


torch.manual_seed(21)
x, y, noise = torch.randn(30, 5), torch.randint(0, 3, (30,)), torch.randn(30, 2)
nets = nn.ModuleList(kind() for kind in (ConditionalAutoencoder, Quantizer, Counting, Reading))
autoencoder, quantizer, counting, reading = nets
opt = torch.optim.SGD(nets.parameters(), lr=0.1)
for step in range(9):
    rows = torch.randperm(30)[:8]
    own, labels = x[rows], y[rows]
    out, distance = autoencoder(own, labels, noise[rows])
    quantized, commitment = quantizer(own)
    losses = (
        F.mse_loss(out, own) + 0.1 * distance.mean(),
        F.cross_entropy(quantized, labels) + commitment.mean(),
        counting(own, labels).mean(),
        F.cross_entropy(reading(own, labels), labels),
    )
    opt.zero_grad()
    sum(losses).backward()
    opt.step()
    print("loss", *(f"{loss.item():.6g}" for loss in losses))
torch.save(nets.state_dict(), "model.pt")
