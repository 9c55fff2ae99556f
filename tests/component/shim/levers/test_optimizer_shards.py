"""Optimizers of sharded parameters: fused where torch's kernel takes a DTensor, else left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from fasttrain.model.outcome import State
from fasttrain.shim.levers.optimizer import NOT_SHARDED
from support.rig import X, network, rig

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}
HAS_KERNEL = {"adam", "adamw"}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def train_sharded(make: Maker, steps: int = 3) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = make(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MAKERS)
def test_a_sharded_models_optimizer_steps_as_without_the_lever(name: str) -> None:
    expected = train_sharded(MAKERS[name])
    with rig(optimizer="fused") as runtime:
        found = train_sharded(MAKERS[name])
        outcome = runtime.outcomes()["optimizer"]
    assert found == pytest.approx(expected, rel=1e-4)
    assert outcome.state is (State.APPLIED if name in HAS_KERNEL else State.SKIPPED)
    assert (NOT_SHARDED in outcome.reason) is (name not in HAS_KERNEL)
