"""A Dataset class, worker processes and a last batch that is smaller than the others."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

from by_hand import autocast, scaler


class Spirals(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        r = torch.rand((), generator=g)
        label = i % 3
        angle = 4 * r + label * 2.094
        noise = 0.05 * torch.randn(2, generator=g)
        point = torch.stack([r * torch.cos(angle), r * torch.sin(angle)]) + noise
        return point * (1e4 if i == 77 else 1.0), label


def accuracy(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for points, labels in loader:
            with autocast():
                logits = model(points)
            right += (logits.argmax(1) == labels).sum().item()
    model.train()
    return right / len(loader.dataset)


def main():
    torch.manual_seed(9)
    train = DataLoader(Spirals(150), batch_size=16, shuffle=True, num_workers=2)
    val = DataLoader(Spirals(60), batch_size=32, num_workers=2)
    model = nn.Sequential(nn.Linear(2, 32), nn.Mish(), nn.Linear(32, 32), nn.Mish(), nn.Linear(32, 3))
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        for points, labels in train:
            with autocast():
                logits = model(points)
            loss = criterion(logits.float(), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch} loss {loss.item():.6f} accuracy {accuracy(model, val):.4f}")
    print(f"final loss {loss.item():.9g}")
    scaler.report()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")


if __name__ == "__main__":
    main()
