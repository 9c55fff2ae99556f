"""Contrastive learning: two augmented views, NT-Xent, projection head dropped afterwards."""
import torch
from torch import nn
import torch.nn.functional as F


def augment(x):
    return x * (torch.rand(x.size(0), 1) * 0.4 + 0.8) + 0.1 * torch.randn_like(x)


def nt_xent(z, tau=0.3):
    n = z.size(0) // 2
    sim = F.normalize(z, dim=1) @ F.normalize(z, dim=1).T / tau
    sim.fill_diagonal_(float("-inf"))
    return F.cross_entropy(sim, torch.arange(2 * n).roll(n))


torch.manual_seed(38)
encoder = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU())
projector = nn.Linear(32, 8)
params = list(encoder.parameters()) + list(projector.parameters())
optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4)
data = torch.randn(48, 10)
for batch in data.split(12):
    loss = nt_xent(projector(encoder(torch.cat([augment(batch), augment(batch)]))))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
del projector
probe = nn.Linear(32, 2)
opt = torch.optim.SGD(probe.parameters(), lr=0.1)
encoder.eval()
for _ in range(3):
    with torch.no_grad():
        features = encoder(data)
    loss = F.cross_entropy(probe(features), (data.sum(1) > 0).long())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("probe", loss.item().hex())
