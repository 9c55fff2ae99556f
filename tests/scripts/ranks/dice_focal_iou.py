"""Segmentation: focal, dice over the batch, soft IoU by class; hard IoU as a metric."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(9)
grid = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"))
centres = torch.rand(22, 2, 1, 1) * 8
masks = ((grid - centres).pow(2).sum(1) < 8).long() + ((grid - centres).abs().sum(1) < 2).long()
images = masks[:, None].float() + 0.5 * torch.randn(22, 1, 8, 8)
net = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1))
opt = torch.optim.Adam(net.parameters(), lr=0.05)
for step in range(8):
    rows = torch.randint(0, 22, (5 + step % 4,))
    x, y = images[rows], masks[rows]
    logits = net(x)
    hot = F.one_hot(y, 3).movedim(-1, 1).float()
    p = logits.softmax(1)
    dice = 1 - (2 * (p * hot).sum((0, 2, 3)) / (p + hot).sum((0, 2, 3))).mean()
    ce = F.cross_entropy(logits, y, reduction="none")
    focal = ((1 - (-ce).exp()) ** 2 * ce).mean()
    soft = (p * hot).sum() / (p + hot - p * hot).sum()
    loss = dice + focal - soft.log()
    opt.zero_grad()
    loss.backward()
    opt.step()
    guess = logits.argmax(1)
    iou = [((guess == c) & (y == c)).sum() / ((guess == c) | (y == c)).sum().clamp(min=1) for c in range(3)]
    print(f"dice {dice.item():.6g} focal {focal.item():.6g} iou", *(f"{i:.6g}" for i in iou))
torch.save(net.state_dict(), "model.pt")
