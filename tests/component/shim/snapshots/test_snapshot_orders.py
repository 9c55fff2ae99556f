"""Batches of a resumed loop come in the order in which they would have come."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from fasttrain.shim.snapshots.loader_epochs import LoaderEpochs
from fasttrain.shim.snapshots.object_states import RandomStates
from support.preempted import data, loss_of, network

Tick = Callable[[], None]


def train(model: Any, optimizer: Any, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def side_by_side(tick: Tick) -> Any:
    """Both passes begin before the first batch of either is drawn."""
    own = torch.Generator().manual_seed(3)
    loaders = [DataLoader(data(60, n), 8, shuffle=True, generator=own) for n in (1, 2)]
    loaders += [DataLoader(data(60, n), 8, shuffle=True) for n in (3, 4)]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for batches in zip(*loaders, strict=True):
            train(model, optimizer, sum(loss_of(model, x, y) for x, y in batches))
            tick()
    return model.state_dict()


def before_the_model(tick: Tick) -> Any:
    """A pass begins, and then random weights are drawn."""
    loader = DataLoader(data(), 8, shuffle=True)
    batches = iter(loader)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches:
        train(model, optimizer, loss_of(model, x, y))
        tick()
    return model.state_dict()


class Buffered(IterableDataset):  # type: ignore[type-arg]
    """A shuffle buffer, as streams have it."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for number in range(60):
            buffer.append(number)
            if len(buffer) > 12:
                chosen = buffer.pop(int(torch.randint(len(buffer), (1,))))
                yield torch.full((4,), chosen / 60), float(chosen % 2)


def buffered(tick: Tick, dropout: float = 0.2) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for x, y in DataLoader(Buffered(), 4):
            train(model, optimizer, loss_of(model, x, y.float()))
            tick()
    return model.state_dict()


@pytest.mark.parametrize(
    ("loop", "stop_at"),
    [(side_by_side, 11), (before_the_model, 3), (partial(buffered, dropout=0), 5)],
)
def test_batches_come_in_their_order(preempted: Any, loop: Any, stop_at: int) -> None:
    assert preempted.differ(loop, stop_at) == []


def test_an_order_that_depends_on_the_loops_own_draws_is_refused(
    preempted: Any, capfd: Any
) -> None:
    with pytest.raises(SystemExit) as end:
        preempted.differ(buffered, 5)
    assert end.value.code == 78
    assert "[snapshot-order]" in capfd.readouterr().err


class Buckets(Sampler):  # type: ignore[type-arg]
    """Makes batches by a generator of its own; which one is up to the test."""

    def __init__(self, draws: Any) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(60))
        shuffle = getattr(self.draws, "shuffle", None)
        if shuffle is not None:
            shuffle(order)
        else:
            order = torch.randperm(60, generator=self.draws).tolist()
        for start in range(0, 60, 8):
            yield order[start : start + 8]


class Reordered(Sampler):  # type: ignore[type-arg]
    """Shuffles its own list, by Python's generator, and counts its epochs."""

    def __init__(self) -> None:
        self.order, self.epoch = list(range(60)), 0

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        self.epoch += 1
        self.last = self.epoch  # which is not there at first
        return iter(self.order[self.epoch :])


def sampled(tick: Tick, **options: Any) -> Any:
    loader = DataLoader(data(), **{name: make() for name, make in options.items()})
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            tick()
    return model.state_dict()


def mined(tick: Tick, *, at_once: bool = False) -> Any:
    """Hard samples come more often, from the next epoch on or, which changes nothing, at once."""
    samples = data()
    sampler = WeightedRandomSampler(torch.ones(60), 60)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        for x, y in DataLoader(samples, 8, sampler=sampler):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            if at_once:
                sampler.weights[len(x)] += 1
            tick()
        with torch.no_grad():
            sampler.weights = (model(samples.tensors[0]).squeeze(1) - 1).double() ** 2
    return model.state_dict()


@pytest.mark.parametrize(
    "loop",
    [
        partial(sampled, batch_sampler=lambda: Buckets(random.Random(0))),
        partial(sampled, batch_sampler=lambda: Buckets(np.random.default_rng(0))),
        partial(sampled, batch_sampler=lambda: Buckets(np.random.RandomState(0))),
        partial(sampled, batch_sampler=lambda: Buckets(torch.Generator().manual_seed(0))),
        partial(sampled, sampler=Reordered, batch_size=lambda: 8),
        mined,
        partial(mined, at_once=True),
    ],
)
def test_what_samplers_keep_comes_back(preempted: Any, loop: Any) -> None:
    assert preempted.differ(loop, 12) == []


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": lambda: Buckets(iter([1]))},
        {"batch_sampler": lambda: Buckets([map(int, "1")])},
        {"sampler": lambda: iter(range(60))},
    ],
)
def test_a_sampler_whose_place_can_not_be_told_is_refused(
    preempted: Any, capfd: Any, options: Any
) -> None:
    with pytest.raises(SystemExit):
        preempted.attempt(partial(sampled, **options), 0)
    assert "[snapshot-order]" in capfd.readouterr().err


def test_batches_that_are_dealt_to_the_ranks_are_left_out_a_hand_at_a_time() -> None:
    with ExitStack() as undo:
        passes = LoaderEpochs(RandomStates(None))
        passes.prepare(undo)
        passes.dealt = 2
        iterator = passes.made(DataLoader(range(60), 8))  # type: ignore[arg-type]
        passes.leave_out(iterator)
        assert next(iterator._sampler_iter)[0] == 8  # not cut: all ranks read it whole
        whole = iterator._sampler_iter
        iterator._sampler_iter = (hand[0] for hand in zip(whole, whole, strict=True))
        passes.leave_out(iterator)
        assert next(iterator._sampler_iter)[0] == 32
