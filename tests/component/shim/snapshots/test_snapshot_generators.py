"""Generators from which a model, a data set or a collate function draws go on where they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fasttrain.shim.snapshots.files import packed, unpacked
from fasttrain.shim.snapshots.generators import generator_state, set_generator
from fasttrain.shim.snapshots.script_tensors import ScriptTensors
from support.preempted import data, loss_of, network

Tick = Callable[[], None]


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


MAKERS: list[Callable[[], Any]] = [
    lambda: torch.Generator().manual_seed(1),
    lambda: random.Random(1),
    lambda: np.random.default_rng(1),
    lambda: np.random.RandomState(1),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_generator_goes_on_where_it_was(make: Any) -> None:
    one = make()
    draw(one)
    state = unpacked(packed(generator_state(one)))
    wanted = [draw(one) for _ in range(3)]
    other = make()
    set_generator(other, state)
    assert [draw(other) for _ in range(3)] == wanted


def test_the_systems_own_has_no_state() -> None:
    assert generator_state(random.SystemRandom()) is None
    assert generator_state(random) is None


class Masked(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.body, self.rngs = network(), [make()]

    def forward(self, x: Tensor) -> Any:
        return self.body(x * draw(self.rngs[0]))


def in_a_model(tick: Tick, make: Any) -> Any:
    model = Masked(make)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for x, y in DataLoader(data(), 8, shuffle=True):
            train(optimizer, loss_of(model, x, y))
            tick()
    return model.state_dict(), draw(model.rngs[0])


def train(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Noisy(Dataset):  # type: ignore[type-arg]
    def __init__(self, make: Any) -> None:
        self.rng = make()

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        x, y = data()[index]
        return x * draw(self.rng), y


class Masking:
    """Makes batches as an object, or by a method."""

    def __init__(self, make: Any) -> None:
        self.rng = make()

    def __call__(self, samples: Any) -> Any:
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return x * draw(self.rng), y


def in_a_data_set(tick: Tick, make: Any) -> Any:
    return trained(tick, Noisy(make))


def in_a_collate_function(tick: Tick, make: Any) -> Any:
    return trained(tick, data(), Masking(make))


def in_a_method(tick: Tick, make: Any) -> Any:
    return trained(tick, data(), Masking(make).__call__)


def trained(tick: Tick, samples: Any, collate: Any = None) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for x, y in DataLoader(samples, 8, shuffle=True, collate_fn=collate):
            train(optimizer, loss_of(model, x, y))
            tick()
    return model.state_dict()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("loop", [in_a_model, in_a_data_set, in_a_collate_function, in_a_method])
def test_it_ends_as_if_it_was_not_preempted(preempted: Any, loop: Any, make: Any) -> None:
    assert preempted.differ(lambda tick: loop(tick, make), 11) == []


def test_a_generator_that_is_missing_is_reported(capfd: Any) -> None:
    saved = ScriptTensors(lambda: [("x", [random.Random(1)])]).generators()
    ScriptTensors(lambda: [("x", [np.random.default_rng(1)])]).restore_generators(saved)
    assert "x.0" in capfd.readouterr().err
