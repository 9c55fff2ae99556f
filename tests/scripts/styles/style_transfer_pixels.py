"""Optimizes pixels, not weights: Gram matrices of a fixed random convnet."""
import torch
from torch import nn

torch.manual_seed(83)
features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU()).eval()
for p in features.parameters():
    p.requires_grad_(False)


def gram(x):
    f = x.flatten(2)
    return f @ f.transpose(1, 2) / f.shape[-1]


with torch.no_grad():
    style = gram(features(torch.randn(1, 1, 12, 12)))
image = torch.zeros(1, 1, 12, 12).normal_(0, 0.1).requires_grad_()
optimizer = torch.optim.Adam([image], lr=0.05)
for step in range(6):
    optimizer.zero_grad()
    loss = (gram(features(image)) - style).square().sum() + 1e-3 * image.diff(dim=-1).abs().sum()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        image.clamp_(-2, 2)
    print(step, loss.item().hex())
