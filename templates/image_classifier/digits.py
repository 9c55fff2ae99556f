"""Train a small convolutional network to read 8x8 images of handwritten digits.

The images are in the folder of this file, so nothing is downloaded. Training takes less than half a
minute on two CPU cores.
"""

import argparse
import csv
import gzip
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split

DATA = Path(__file__).with_name("digits.csv.gz")
CLASSES = 10
VALIDATION_IMAGES = 297

Batches = DataLoader[tuple[Tensor, Tensor]]


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """The images as (1, 8, 8) floats in [0, 1], each with its digit."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt", newline="") as file:
            rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
        self.images = rows[:, :64].view(-1, 1, 8, 8) / 16  # a pixel counts 0 to 16 dark points
        self.labels = rows[:, 64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Refine x (batch, channels, height, width)."""
        y = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(x + self.norm2(self.conv2(y)))


class DigitNet(nn.Module):
    """A stem, a residual block at 8x8, one at 4x4 and a linear classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.fine = ResidualBlock(width)
        self.down = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.coarse = ResidualBlock(2 * width)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (batch, 10) of images (batch, 1, 8, 8)."""
        x = self.coarse(self.down(self.fine(self.stem(images))))
        return self.head(x.mean(dim=(2, 3)))


def make_loaders(args: argparse.Namespace) -> tuple[Batches, Batches]:
    """Split the images and return the loaders for training and validation."""
    digits = Digits(DATA)
    sizes = [len(digits) - VALIDATION_IMAGES, VALIDATION_IMAGES]
    train_set, validation_set = random_split(digits, sizes)
    # A small last batch would give noisy statistics to batch norm, so it is dropped.
    train_loader = DataLoader(
        train_set, args.batch, shuffle=True, drop_last=True, num_workers=args.workers
    )
    return train_loader, DataLoader(validation_set, args.batch, num_workers=args.workers)


def train_epoch(
    model: nn.Module,
    loader: Batches,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
) -> float:
    """Train for one epoch and return the mean loss."""
    model.train()
    total = torch.zeros((), device=device)  # summed on the device, so that no step waits
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
    return total.item() / len(loader)


@torch.no_grad()
def accuracy(model: nn.Module, loader: Batches, device: torch.device) -> float:
    """Return the share of correctly classified images."""
    model.eval()
    correct = count = 0
    for images, labels in loader:
        predictions = model(images.to(device)).argmax(dim=1)
        correct += int((predictions == labels.to(device)).sum())
        count += len(labels)
    return correct / count


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=50, help="images per step")
    parser.add_argument("--width", type=int, default=32, help="channels of the first block")
    parser.add_argument("--lr", type=float, default=0.05, help="peak learning rate")
    parser.add_argument("--momentum", type=float, default=0.9, help="Nesterov momentum")
    parser.add_argument("--weight-decay", type=float, default=5e-4, help="weight decay")
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, weights and order")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to save a checkpoint")
    return parser.parse_args()


def main() -> None:
    """Train, validate after each epoch and, if asked, save."""
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, validation_loader = make_loaders(args)
    model = DigitNet(args.width).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        nesterov=True,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=len(train_loader)
    )
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, train_loader, optimizer, scheduler, device)
        share = accuracy(model, validation_loader, device)
        print(f"epoch {epoch:3d}  train loss {loss:.4f}  validation accuracy {share:.4f}")
    if args.out:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out)


if __name__ == "__main__":
    main()
