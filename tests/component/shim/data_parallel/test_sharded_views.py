"""Sharded models and blocks that return views, which are changed in place, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.shards.replica import ShardedReplica
from support.forked_ranks import on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x.transpose(1, 2)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(x)
            h += x
            x = h
        return self.head(x).squeeze(-1)


def gradients(model: nn.Module, call: Any) -> dict[str, Tensor]:
    y = call(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)))
    y *= 2
    y.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_view_that_is_changed_in_place_has_its_derivatives(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        ranks.join()
        torch.manual_seed(0)
        plain, model = Model(), Model()
        model.load_state_dict(plain.state_dict())
        replica = ShardedReplica(model, ranks, [], lambda _: None)
        assert replica.blocks == 2
        sharded: Any = gradients(model, lambda x: replica.call(model, (x,), {}))
        wanted = gradients(plain, plain)
        return {name: float((g - sharded[name].full_tensor()).norm()) for name, g in wanted.items()}

    for ended in on_ranks(tmp_path / "ranks", act):
        differences = ended.good
        assert len(differences) == 6
        assert list(differences.values()) == pytest.approx([0.0] * 6, abs=1e-6)
        assert "Warning" not in ended.stderr
