# ruff: noqa: T201
"""Trains, saves all that a project saves, and resumes from it.

    python train.py --steps 8 --save DIR [--resume DIR] [--optimizer NAME] [--spike STEP]

--steps counts from the very beginning, also when it resumes.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from nets import Net
from torch import nn

MAKERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}
AVERAGE_FROM = 1  # the averaged copy is taken when the first step is done


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(12, 3, 8, 8, generator=generator)
    return inputs, torch.randint(0, 5, (12,), generator=generator)


def averaged(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False).eval()


@torch.no_grad()
def follow(ema: nn.Module, model: nn.Module, decay: float = 0.9) -> None:
    for average, value in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(value, 1 - decay)
    for average, value in zip(ema.buffers(), model.buffers(), strict=True):
        average.copy_(value)


class Training:
    def __init__(self, optimizer: str = "adamw") -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.ema: nn.Module | None = None
        self.optimizer = MAKERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.step = 0

    def take_step(self, spike: int) -> float:
        inputs, targets = batch_of(self.step)
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad()
        (loss * 1e30 if self.step == spike else loss).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        if self.step == AVERAGE_FROM:
            self.ema = averaged(self.model)
        follow(self.ema, self.model)
        return loss.item()

    @torch.no_grad()
    def validate(self) -> float:
        inputs, targets = batch_of(-1)
        return nn.functional.cross_entropy(self.ema(inputs), targets).item()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "ema": self.ema.state_dict(),
        }
        torch.save(checkpoint, folder / "checkpoint.pt")
        torch.save(self.model, folder / "model.pt")
        torch.save(self.ema, folder / "ema.pt")

    def resume(self, folder: Path) -> None:
        checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
        self.step = checkpoint["step"]
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.ema = averaged(self.model)
        self.ema.load_state_dict(checkpoint["ema"])


def main(argv: list[str] | None = None) -> Training:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--optimizer", choices=MAKERS, default="adamw")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--spike", type=int, default=-1)
    args = parser.parse_args(argv)
    training = Training(args.optimizer)
    if args.resume:
        training.resume(args.resume)
    while training.step < args.steps:
        loss = training.take_step(args.spike)
        print(f"step {training.step} loss {loss!r} validation {training.validate()!r}")
    if args.save:
        training.save(args.save)
    return training


if __name__ == "__main__":
    main()
