"""The model computes its own loss, in a method that is not forward."""
import torch
import torch.nn.functional as F
from torch import nn

from by_hand import autocast, scaler


class Detector(nn.Module):
    def __init__(self, features=10, hidden=24):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.class_head = nn.Linear(hidden, 3)
        self.box_head = nn.Linear(hidden, 4)

    def predict(self, x):
        h = self.backbone(x)
        return self.class_head(h), self.box_head(h)

    def loss(self, x, labels, boxes):
        h = self.backbone(x)
        classification = F.cross_entropy(self.class_head(h), labels, reduction="sum")
        regression = F.smooth_l1_loss(self.box_head(h), boxes)
        return classification + 2.0 * regression


def batches(n, size=16):
    g = torch.Generator().manual_seed(0)
    w = torch.randn(10, 7, generator=g)
    for i in range(n):
        x = torch.randn(size, 10, generator=g)
        y = x @ w
        yield x, y[:, :3].argmax(1), y[:, 3:].tanh()


def main():
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for i, (x, labels, boxes) in enumerate(batches(28)):
        with autocast():
            loss = model.loss(x, labels, boxes)
        loss = loss.float()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % 7 == 0:
            print(f"{i:3d} {loss.item():.6f}")
    with torch.no_grad():
        model.eval()
        with autocast():
            scores, _ = model.predict(x)
        scores = scores.float()
        print("accuracy", (scores.argmax(1) == labels).float().mean().item())
    print(f"final loss {loss.item():.9g}")
    scaler.report()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")


if __name__ == "__main__":
    main()
