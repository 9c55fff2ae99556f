"""A small U-Net with skip connections, dice and cross-entropy, OneCycle."""
import torch
from torch import nn
import torch.nn.functional as F


def double_conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU(inplace=True), nn.Conv2d(b, b, 3, padding=1), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2 = double_conv(1, 4), double_conv(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.u1, self.out = double_conv(8, 4), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        return self.out(self.u1(torch.cat([a, self.up(b)], 1)))


def dice(logits, y):
    p = logits.softmax(1)[:, 1]
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


torch.manual_seed(81)
model = UNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=5)
x = torch.randn(2, 1, 12, 12)
y = (F.avg_pool2d(x, 3, 1, 1)[:, 0] > 0).long()
for step in range(5):
    logits = model(x)
    loss = F.cross_entropy(logits, y) + dice(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(step, loss.item().hex())
