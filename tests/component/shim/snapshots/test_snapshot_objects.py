"""What optimizers, data sets and models keep for themselves comes back, or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from support.preempted import data, loss_of, network

Tick = Callable[[], None]


class Decaying(torch.optim.Optimizer):
    """Counts its steps in its state, beside what belongs to parameters."""

    def __init__(self, parameters: Any, key: Any = "step") -> None:
        super().__init__(parameters, {})
        self.key = key
        self.state[key] = 0  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state[self.key] += 1  # type: ignore[operator]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1 / self.state[self.key])


def decaying(tick: Tick, key: Any = "step") -> Any:
    model = network()
    optimizer = Decaying(model.parameters(), key)
    for x, y in DataLoader(data(), 8, shuffle=True):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        tick()
    return model.state_dict(), optimizer.state[key]


def hooked(tick: Tick) -> Any:
    """Takes features from within, of batches of two sizes, and counts calls there."""
    model, head, seen = network(), nn.Linear(8, 1), {"calls": 0}

    def note(_: Any, __: Any, output: Any) -> None:
        seen["features"] = output
        seen["calls"] += 1

    model[1].register_forward_hook(note)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    for _ in range(3):
        for x, y in DataLoader(data(), 8, shuffle=True):
            optimizer.zero_grad()
            (loss_of(model, x, y) + loss_of(head, seen["features"], y)).backward()
            optimizer.step()
            tick()
    return model.state_dict(), head.state_dict(), seen["calls"]


# Not written out in the call: the compile lever, which other tests in this process pull, reads all
# modules of a script for it, and these are its modules.
SECOND = {"create_graph": True}


def penalized(tick: Tick) -> Any:
    """Takes ``grad`` for a name of its own, as ``from torch.autograd import grad`` does."""
    grad = torch.autograd.grad
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data(), 8, shuffle=True):
        x.requires_grad_()
        (slope,) = grad(model(x).sum(), x, **SECOND)
        optimizer.zero_grad()
        (loss_of(model, x, y) + 0.1 * slope.square().sum()).backward()
        optimizer.step()
        tick()
    return model.state_dict()


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        raise NotImplementedError("streams have no length")

    def __iter__(self) -> Iterator[Any]:
        return iter(data())


def streamed(tick: Tick) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(Stream(), 8):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        tick()
    return model.state_dict()


def stored(tick: Tick, keep: Callable[[Any], Any]) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in keep(DataLoader(data(), 8, shuffle=True)):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        tick()


@pytest.mark.parametrize(
    ("loop", "stop_at"), [(decaying, 4), (streamed, 4), (hooked, 12), (penalized, 5)]
)
def test_it_ends_as_if_it_was_not_preempted(preempted: Any, loop: Any, stop_at: int) -> None:
    assert preempted.differ(loop, stop_at) == []


@pytest.mark.parametrize(
    ("loop", "slug"),
    [
        (partial(decaying, key=torch.ones(1)), "snapshot-objects"),
        (partial(stored, keep=itertools.cycle), "snapshot-cycle"),
        (partial(stored, keep=lambda loader: itertools.tee(loader)[0]), "snapshot-cycle"),
    ],
)
def test_what_can_not_be_kept_is_refused_at_once(
    preempted: Any, capfd: Any, loop: Any, slug: str
) -> None:
    with pytest.raises(SystemExit) as end:
        preempted.attempt(loop, 0)
    assert end.value.code == 78
    assert f"[{slug}]" in capfd.readouterr().err
