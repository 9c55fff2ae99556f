"""Everything is set in a frozen dataclass, and built by functions that take it."""
from dataclasses import asdict, dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Config:
    seed: int = 3
    width: int = 16
    depth: int = 2
    lr: float = 3e-3
    steps: int = 6
    batch_size: int = 10


def build_model(cfg: Config) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(4, cfg.width)]
    for _ in range(cfg.depth):
        layers += [nn.LayerNorm(cfg.width), nn.SiLU(), nn.Linear(cfg.width, cfg.width)]
    return nn.Sequential(*layers, nn.Linear(cfg.width, 1))


def make_batch(cfg: Config, gen: torch.Generator):
    x = torch.randn(cfg.batch_size, 4, generator=gen)
    return x, x.pow(2).sum(1, keepdim=True)


def train(cfg: Config) -> float:
    torch.manual_seed(cfg.seed)
    gen = torch.Generator().manual_seed(cfg.seed + 1)
    model = build_model(cfg)
    optimizer = torch.optim.RAdam(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        x, y = make_batch(cfg, gen)
        loss = (model(x) - y).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, float(loss).hex())
    return float(loss)


if __name__ == "__main__":
    print(asdict(Config()))
    print("final", train(Config()).hex())
