"""Batches as dictionaries, rare classes that count more, and a second head for every other step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Specimens(Dataset):
    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.features = torch.randn(n, 9, generator=g)
        length = 0.5 * self.features[:, 3] - 0.5 * self.features[:, 5]
        self.weight = torch.tanh(length) + 0.1 * torch.randn(n, generator=g)
        noisy = self.features[:, 0] + 0.5 * torch.randn(n, generator=g)
        self.species = (noisy > 0.0).long() + (noisy > 1.0).long()

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, i: int) -> dict:
        return {
            "id": f"specimen-{i:03d}",
            "features": self.features[i],
            "species": int(self.species[i]),
            "weight": self.weight[i],
        }


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU())
        self.species = nn.Linear(24, 3)
        self.weight = nn.Linear(24, 1)
        self.temperature = nn.Parameter(torch.ones(1))  # from an older version of the model

    def forward(self, features: Tensor, with_weight: bool = False) -> dict[str, Tensor]:
        hidden = self.trunk(features)
        out = {"logits": self.species(hidden)}
        if with_weight:
            out["weight"] = self.weight(hidden).squeeze(-1)
        return out


def move(batch: dict, device: torch.device) -> dict:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def validate(model: nn.Module, loader: DataLoader, device: torch.device) -> dict[str, float]:
    model.eval()
    right, squares, missed = 0, 0.0, []
    with torch.no_grad():
        for batch in map(lambda b: move(b, device), loader):
            out = model(batch["features"], with_weight=True)
            hit = out["logits"].argmax(1) == batch["species"]
            right += hit.sum().item()
            squares += (out["weight"] - batch["weight"]).square().sum().item()
            missed += [name for name, ok in zip(batch["id"], hit.tolist()) if not ok]
    n = len(loader.dataset)
    return {"accuracy": right / n, "mse": squares / n, "first_missed": min(missed, default="none")}


def main() -> None:
    torch.manual_seed(77)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set = Specimens(77, seed=10)
    val_set = Specimens(40, seed=11)
    train_loader = DataLoader(train_set, batch_size=10, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=16)

    counts = torch.bincount(train_set.species, minlength=3)
    class_weight = (len(train_set) / (3 * counts)).to(device)
    model = TwoHeads().to(device)
    criterion = nn.CrossEntropyLoss(weight=class_weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    step = 0
    for epoch in range(4):
        model.train()
        for batch in train_loader:
            batch = move(batch, device)
            out = model(batch["features"], with_weight=step % 2 == 1)
            loss = criterion(out["logits"], batch["species"])
            if "weight" in out:
                loss = loss + nn.functional.mse_loss(out["weight"], batch["weight"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.9g}")
            step += 1
        scores = validate(model, val_loader, device)
        print(f"epoch {epoch} " + " ".join(
            f"{k} {v:.5f}" if isinstance(v, float) else f"{k} {v}" for k, v in scores.items()))

    print(f"final loss {loss.item():.9g}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")


if __name__ == "__main__":
    main()
