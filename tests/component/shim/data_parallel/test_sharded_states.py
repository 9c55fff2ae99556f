"""Where whole tensors lie: those of a sharded checkpoint, and of a model that is being sharded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

from fasttrain.shim.data_parallel.shards import checkpoints, replica


@pytest.mark.parametrize(
    ("free", "total", "place"), [(50, 100, "device"), (11, 100, "device"), (10, 100, "host")]
)
def test_a_nearly_full_device_has_them_on_the_host(
    monkeypatch: pytest.MonkeyPatch, free: int, total: int, place: str
) -> None:
    memory = SimpleNamespace(mem_get_info=lambda _: (free, total))
    monkeypatch.setattr(checkpoints, "module_of", lambda _: memory)
    whole = SimpleNamespace(device=torch.device("cuda"), cpu=lambda: "host")
    shard = SimpleNamespace(full_tensor=lambda: whole, device=whole.device)
    monkeypatch.setattr(checkpoints.COPIES, "lend", lambda _: whole)
    told: list[str] = []
    found: Any = checkpoints._for_checkpoint(shard, told.append)
    assert found == ("host" if place == "host" else whole)
    assert bool(told) == (place == "host")


def test_what_is_no_shard_stays_as_it_is() -> None:
    whole = torch.ones(2)
    assert checkpoints._for_checkpoint(whole, pytest.fail) is whole
    assert checkpoints._for_checkpoint(3, pytest.fail) == 3


def test_a_block_is_freed_before_the_next_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's optimizers still have its whole parameters, of which a model may not fit."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    whole = list(model.parameters())
    left: list[int] = []

    def shard(module: nn.Module, **_: Any) -> None:
        left.append(sum(p.untyped_storage().nbytes() for p in whole))
        for part in module.modules():
            names = [name for name, p in part._parameters.items() if p is not None]
            part._parameters.update({name: nn.Parameter(torch.ones(1)) for name in names})

    monkeypatch.setattr(fsdp, "fully_shard", shard)
    replica._fully_shard([*model, model], None)
    assert left == [128, 64, 0]
