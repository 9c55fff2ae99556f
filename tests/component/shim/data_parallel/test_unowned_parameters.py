"""Parameters that belong to no root: which are averaged, whenever the garbage collector ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.backward import UnownedParameters
from fasttrain.shim.hooks.loop import TrainingState
from fasttrain.shim.hooks.roots import RootCalls


class Rank:
    """One of two ranks; the other one has found what `elsewhere` makes of what this one has."""

    def __init__(self) -> None:
        self.world_size = 2
        self.searches = 0
        self.elsewhere: Any = lambda text: text

    def gather(self, text: str) -> list[str]:
        self.searches += 1
        return [text, self.elsewhere(text)]

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Do nothing: the other rank has the same."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def unowned(rank: Any) -> Iterator[UnownedParameters]:
    with ExitStack() as undo:
        training = TrainingState(RootCalls())
        training.install(undo)
        yield UnownedParameters(rank, training)


def made(dropped_late: bool = False) -> tuple[nn.Parameter, torch.optim.SGD]:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer: Any = torch.optim.SGD([parameter])
    if dropped_late:
        optimizer.itself = optimizer
    return parameter, optimizer


def found(unowned: UnownedParameters, *roots: Any) -> list[int]:
    unowned.find(roots, len(roots))
    return [id(parameter) for parameter in unowned.parameters]


def test_one_that_takes_the_place_of_another_is_found(unowned: UnownedParameters) -> None:
    first, optimizer = made()
    assert found(unowned) == [id(first)]
    second, optimizer = made()
    assert found(unowned) == [id(second)]
    del optimizer


def test_what_another_rank_has_dropped_already_is_left_out(
    unowned: UnownedParameters, rank: Rank
) -> None:
    made(dropped_late=True)
    second, optimizer = made()
    rank.elsewhere = lambda text: text.split()[-1]
    assert found(unowned) == [id(second)]
    del optimizer


def test_what_is_dropped_changes_nothing_by_itself(unowned: UnownedParameters, rank: Rank) -> None:
    first, optimizer = made()
    assert found(unowned) == [id(first)]
    del optimizer
    assert found(unowned) == [id(first)]
    assert rank.searches == 1


def test_one_that_is_added_to_an_optimizer_is_found(unowned: UnownedParameters) -> None:
    first, optimizer = made()
    second = nn.Parameter(torch.zeros(1))
    assert found(unowned) == [id(first)]
    optimizer.param_groups[0]["params"].append(second)
    assert found(unowned) == [id(first), id(second)]


def test_one_that_a_root_has_got_is_the_roots(unowned: UnownedParameters) -> None:
    first, optimizer = made()
    assert found(unowned) == [id(first)]
    assert found(unowned, SimpleNamespace(parameters=[first])) == []
    del optimizer
