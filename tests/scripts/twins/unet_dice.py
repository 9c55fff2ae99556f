"""Segmentation: a two-level U-Net with interpolation, and dice plus BCE as the loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from by_hand import autocast, scaler


class DoubleConv(nn.Sequential):
    def __init__(self, n_in, n_out):
        super().__init__(
            nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.inc = DoubleConv(1, width)
        self.down = DoubleConv(width, 2 * width)
        self.up = DoubleConv(3 * width, width)
        self.outc = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down(F.max_pool2d(x1, 2))
        x2 = F.interpolate(x2, size=x1.shape[-2:], mode="bilinear", align_corners=False)
        return self.outc(self.up(torch.cat([x1, x2], dim=1)))


def dice_loss(logits, target, smooth=1.0):
    probs = torch.sigmoid(logits)
    overlap = (probs * target).sum(dim=(1, 2, 3))
    total = probs.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
    return (1 - (2 * overlap + smooth) / (total + smooth)).mean()


def discs(n, generator):
    centre = torch.randint(3, 9, (n, 2, 1, 1), generator=generator)
    rows, cols = torch.arange(12).view(-1, 1), torch.arange(12).view(1, -1)
    mask = ((rows - centre[:, 0]) ** 2 + (cols - centre[:, 1]) ** 2 < 9).float().unsqueeze(1)
    return mask + 0.5 * torch.randn(n, 1, 12, 12, generator=generator), mask


class Config:
    seed = 0
    steps = 22
    batch = 4
    lr = 5e-3


def main(cfg=Config):
    torch.manual_seed(cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    for step in range(cfg.steps):
        image, mask = discs(cfg.batch, generator)
        with autocast():
            logits = model(image)
        logits = logits.float()
        bce = F.binary_cross_entropy_with_logits(logits, mask, reduction="sum") / cfg.batch
        loss = bce + dice_loss(logits, mask)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(loss.item())
        if step % 7 == 0:
            print(f"step {step}: loss {loss.item():.6f} lr {optimizer.param_groups[0]['lr']:g}")
    print(f"final loss {loss.item():.9g}")
    scaler.report()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")


main()
