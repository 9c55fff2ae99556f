"""Several tasks; the model returns a dataclass, and torch.autograd.backward takes all losses."""

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_hand import autocast, scaler


@dataclass
class Prediction:
    depth: Tensor
    normals: Tensor
    segments: Tensor
    hidden: Optional[Tensor] = None


class SharedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.GroupNorm(3, 12)
        self.depth = nn.Conv2d(12, 1, 1)
        self.normals = nn.Conv2d(12, 3, 1)
        self.segments = nn.Conv2d(12, 5, 1)

    def forward(self, image: Tensor) -> Prediction:
        h = F.relu(self.norm(self.conv(image)))
        return Prediction(self.depth(h), self.normals(h), self.segments(h))


def losses(found: Prediction, depth: Tensor, normals: Tensor, segments: Tensor) -> list[Tensor]:
    return [
        F.l1_loss(found.depth, depth),
        1 - F.cosine_similarity(found.normals, normals, dim=1).mean(),
        F.cross_entropy(found.segments, segments),
    ]


def main() -> None:
    torch.manual_seed(31)
    model = SharedEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(24):
        image = torch.randn(6, 3, 8, 8)
        if step == 15:
            image[0, 0] = 3e4  # a dead sensor, and a weight to match it
        depth = image.mean(1, keepdim=True)
        segments = image.abs().sum(1).long().clamp(max=4)
        with autocast():
            found = model(image)
        found = Prediction(found.depth.float(), found.normals.float(), found.segments.float())
        parts = losses(found, depth, image.sign(), segments)
        if step == 15:
            parts[0] = parts[0] * 1e4
        optimizer.zero_grad()
        torch.autograd.backward([scaler.scale(part) for part in parts])
        scaler.step(optimizer)
        scaler.update()
        if step % 6 == 0:
            print(step, *(f"{part.item():.6f}" for part in parts))
    print(f"final loss {sum(parts).item():.9g}")
    scaler.report()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")


if __name__ == "__main__":
    main()
