"""How long an epoch is, is asked of torch's own samplers alone, and once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fasttrain.shim.compile_auto.outlook import Outlook, StepClock
from fasttrain.shim.hooks.loop import Epoch, known_epoch
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.tune.epochs import Epochs

ROWS = 10


class Asked(Dataset[Any]):
    """Counts how often its length is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.ones(1)


class Own(Sampler[Any]):
    """A sampler of the script's, which draws to know its length."""

    def __init__(self, drawn: list[Any]) -> None:
        self.drawn = drawn

    def __iter__(self) -> Iterator[Any]:
        return iter(self.drawn)

    def __len__(self) -> int:
        raise AssertionError("the script doesn't ask for it")


class Derived(RandomSampler):
    __len__ = Own.__len__


def trained(loader: DataLoader[Any]) -> None:
    """Train by a loader, watched by all that want to know its length."""
    weight = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.1)
    meter, epochs, clock = StepMeter(0.0), Epochs(), StepClock()
    plan = SimpleNamespace(earlier=None, max_steps=None)
    outlook = Outlook(SimpleNamespace(meter=meter, plan=plan), clock)  # type: ignore[arg-type]
    with ExitStack() as undo:
        for each in (meter, epochs, outlook):
            each.install(undo)
        for x in loader:
            (weight * x).sum().backward()
            sgd.step()
            epochs.after_step()
            outlook.prospect(1.0, 1, forks=False)


@pytest.mark.parametrize(
    "how",
    [
        {"sampler": Own(list(range(ROWS))), "batch_size": 4},
        {"batch_sampler": Own([[0, 1], [2, 3, 4]])},
        {"batch_sampler": BatchSampler(Own(list(range(ROWS))), 4, drop_last=True)},
        {"sampler": Own(list(range(ROWS))), "batch_size": None},
        {"sampler": Derived(range(ROWS)), "batch_size": 4},
    ],
)
def test_a_sampler_of_the_scripts_is_not_asked(how: dict[str, Any]) -> None:
    trained(DataLoader(Asked(), **how))


def test_a_dataset_is_asked_once_more_for_each_iterator() -> None:
    alone, watched = Asked(), Asked()
    for _ in range(2):
        for _ in DataLoader(alone, 2):
            pass
        trained(DataLoader(watched, 2))
    assert watched.asked == alone.asked + 2


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(3, 1))


class Unsized(Asked):
    def __len__(self) -> int:
        raise RuntimeError


IN_FOURS = Epoch(ROWS, 4, 3)


@pytest.mark.parametrize(
    ("loader", "epoch"),
    [
        (DataLoader(Asked(), 4), IN_FOURS),
        (DataLoader(Asked(), 4, shuffle=True), IN_FOURS),
        (DataLoader(Asked(), 4, drop_last=True), Epoch(ROWS, 4, 2)),
        (DataLoader(Asked(), 4, sampler=SubsetRandomSampler(range(ROWS))), IN_FOURS),
        (DataLoader(Asked(), 4, sampler=WeightedRandomSampler([1.0] * 3, ROWS)), IN_FOURS),
        (DataLoader(Asked(), 4, sampler=DistributedSampler(Asked(), 1, 0)), IN_FOURS),
        (DataLoader(Asked(), 4, sampler=list(range(ROWS))), IN_FOURS),
        (DataLoader(Asked(), batch_sampler=[[0, 1], [2]]), Epoch(2, 0, 2)),
        (DataLoader(Asked(), None), Epoch(ROWS, 0, ROWS)),
        (DataLoader(Endless(), 2), None),
        (DataLoader(Unsized(), 4, sampler=SequentialSampler(Unsized())), None),
        (DataLoader(Asked(), 4, sampler=Own([1])), None),
    ],
)
def test_what_is_known(loader: DataLoader[Any], epoch: Epoch | None) -> None:
    assert known_epoch(loader._get_iterator()) == epoch
    if epoch is not None:
        assert epoch.batches == len(loader)
