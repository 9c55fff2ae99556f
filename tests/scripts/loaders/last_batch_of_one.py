#!/usr/bin/env python
"""Predict the strength of a mixture from its parts. 61 mixtures, in batches of 6."""
import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset


class Mixtures(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.parts = torch.rand(n, 7, generator=g)
        weights = torch.tensor([1.5, -0.7, 0.4, 0.0, 0.9, -1.1, 0.3])
        noise = 0.4 * torch.randn(n, generator=g)
        self.strength = torch.sin(2 * self.parts @ weights) + self.parts[:, 0] + noise

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, i):
        return self.parts[i], self.strength[i]


def mse(model, loader, device):
    squares = 0.0
    with torch.no_grad():
        for parts, strength in loader:
            out = model(parts.to(device)).squeeze(-1)
            squares += ((out - strength.to(device)) ** 2).sum().item()
    return squares / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=34)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    train_loader = DataLoader(Mixtures(61, seed=1), args.batch_size, shuffle=True)
    val_loader = DataLoader(Mixtures(31, seed=2), args.batch_size)

    model = nn.Sequential(nn.Linear(7, 20), nn.SiLU(), nn.Linear(20, 1)).to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    n_step = 0
    for epoch in range(args.epochs):
        total = 0
        for parts, strength in train_loader:
            parts, strength = parts.to(device), strength.to(device)
            loss = nn.functional.mse_loss(model(parts).squeeze(-1), strength)
            optimizer.zero_grad()
            loss.backward()
            print(f"step {n_step} loss {loss.item():.9g}")
            optimizer.step()
            total += loss.detach()
            n_step += 1
        mean = total / len(train_loader)
        val = mse(model, val_loader, device)
        print(f"epoch {epoch}: mean of the batch losses {mean.item():.9g}, val mse {val:.6f}")

    print(f"final loss {loss.item():.9g}")
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(),
                "args": vars(args)}, "model.pt")


if __name__ == "__main__":
    main()
