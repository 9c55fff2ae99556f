"""Tensors that a loop carries along come back, wherever it keeps them and whatever made them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.preempted import data, loss_of, network

Tick = Callable[[], None]


def train(optimizer: Any, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def sums_with_a_graph(tick: Tick) -> Any:
    """Losses that nobody detached steer the learning rate."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    rates, loader = [], DataLoader(data(), 8, shuffle=True)
    for epoch in range(5):
        total = torch.zeros(())
        losses = []
        for x, y in loader:
            loss = loss_of(model, x, y) * (1 + epoch)
            train(optimizer, loss)
            total = total + loss
            losses.append(loss)
            tick()
        schedule.step(total.detach())
        rates += [optimizer.param_groups[0]["lr"], torch.stack(losses).mean().item(), loss.item()]
    return model.state_dict(), rates


def plateaus(tick: Tick) -> Any:
    """A tensor steers the learning rate, which ends the loop."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
    rates = []
    for _ in range(7):
        total = torch.zeros(())
        for x, y in DataLoader(data(), 30, shuffle=True):
            loss = loss_of(model, x, y)
            train(optimizer, loss)
            total += loss.detach()
            tick()
        schedule.step(total)
        rates.append(optimizer.param_groups[0]["lr"])
        if rates[-1] < 0.05:
            break
    return model.state_dict(), rates


class Averaged:
    """Changes its tensors where torch does not count it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].data.mul_(0.9).add_(parameter.data, alpha=0.1)


def uncounted(tick: Tick) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    averaged, zeros = Averaged(model), torch.zeros(1)
    by_numpy = zeros.numpy()
    for x, y in DataLoader(data(), 8, shuffle=True):
        loss = loss_of(model, x, y)
        train(optimizer, loss)
        averaged.update(model)
        by_numpy += loss.item()
        tick()
    return model.state_dict(), averaged.shadow, zeros


def inference(tick: Tick) -> Any:
    """Results of inference_mode from before and between, and a snapshot within."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with torch.inference_mode():
        before = model(data().tensors[0])
    for _ in range(2):
        for x, y in DataLoader(data(), 8, shuffle=True):
            train(optimizer, loss_of(model, x, y))
            tick()
        with torch.inference_mode():
            judged = torch.zeros(1)
            for x, y in DataLoader(data(seed=2), 8):
                judged += loss_of(model, x, y)
                tick()
    return model.state_dict(), before.clone(), judged.clone()


def expanded(tick: Tick) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, (x, _) in enumerate(DataLoader(data(), 8, shuffle=True)):
        wanted = torch.tensor([number / 10]).expand(len(x))
        train(optimizer, (model(x).squeeze(1) - wanted).square().mean())
        tick()
    return model.state_dict()


class Tempered(nn.Module):
    """Holds a tensor that is no parameter, and is trained all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.log_alpha = network(), torch.zeros(1, requires_grad=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x) * self.log_alpha.exp()


def trained_attribute(tick: Tick) -> Any:
    model = Tempered()
    optimizer = torch.optim.SGD([*model.parameters(), model.log_alpha], 0.1)
    for x, y in DataLoader(data(), 8, shuffle=True):
        train(optimizer, loss_of(model, x, y))
        tick()
    return model.state_dict(), model.log_alpha.detach()


def summed(tick: Tick) -> Any:
    """Four losses make one step; the signal may come between them."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total: Any = 0.0
    for _ in range(3):
        for number, (x, y) in enumerate(DataLoader(data(), 8, shuffle=True)):
            total = total + loss_of(model, x, y) / 4
            tick()
            if number % 4 == 3:
                train(optimizer, total)
                total = 0.0
    return model.state_dict()


class Signalled(TensorDataset):
    """The signal comes while a sample is read."""

    def __init__(self, tick: Tick) -> None:
        super().__init__(*data().tensors)
        self._tick = tick

    def __getitem__(self, index: Any) -> Any:
        self._tick()
        return super().__getitem__(index)

    __getitems__ = None  # type: ignore[assignment]


def half_a_step(tick: Tick) -> Any:
    """One of two batches of a step is held where nobody finds it."""
    one, other = (DataLoader(d, 8, shuffle=True) for d in (Signalled(tick), data(60, 2)))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (x, y), (x2, y2) in zip(one, other, strict=True):
        train(optimizer, loss_of(model, x, y) + loss_of(model, x2, y2))
    return model.state_dict()


def judged(tick: Tick) -> Any:
    """A signal within an evaluation ends the run there."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data(), 30, shuffle=True):
        train(optimizer, loss_of(model, x, y))
    total = torch.zeros(1)
    with torch.no_grad():
        for x, y in DataLoader(data(), 8):
            total += loss_of(model, x, y)
            tick()
    return model.state_dict(), total


class Chosen:
    """Holds what a content decides the length of, in each way that an object can."""

    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.slot = self.attribute = torch.zeros(1)


def generated() -> Any:
    kept, total = torch.zeros(1), torch.zeros(())
    while True:
        given = yield total
        kept, total = given, kept.sum()


def chosen(tick: Tick) -> Any:
    """What a batch's content decides the shape of, and what the next step reads of it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = within = torch.zeros(1)
    held, items, pair, generator = Chosen(), [within], ("pair", within), generated()
    total, sums = next(generator), []

    def read() -> torch.Tensor:
        return within.sum()

    for x, y in DataLoader(data(), 7, shuffle=True):
        loss = model(x)[y == 1].square().mean()  # the mean of nothing is NaN, in both runs
        train(optimizer, loss + 0 * (before.sum() + pair[1].sum() + total))
        sums.append([before.sum() + read(), held.slot.sum(), held.attribute.sum(), *items, pair[1]])
        before = x[y == 1]
        within = before * 2
        held.slot, held.attribute, items[0], pair = before[:-1], before[1:], before + 1, (0, before)
        total = generator.send(before)
        tick()
    counts = before.shape, within.shape, held.slot.shape, held.attribute.shape, pair[1].shape
    return model.state_dict(), [*map(torch.Size.numel, counts)], sums[-1], total


@dataclass(slots=True)
class Kept:
    average: torch.Tensor


def in_containers(tick: Tick) -> Any:
    """Tensors in other containers than lists and dictionaries."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    last: deque[Any] = deque(maxlen=3)
    space, kept = SimpleNamespace(sum=torch.zeros(1)), Kept(torch.zeros(1))
    for x, y in DataLoader(data(), 8, shuffle=True):
        loss = loss_of(model, x, y)
        train(optimizer, loss)
        last.append(loss.detach())
        space.sum = space.sum + loss.detach()
        kept.average = 0.9 * kept.average + 0.1 * loss.detach()
        tick()
    return model.state_dict(), list(last), space.sum, kept.average


@pytest.mark.parametrize(
    ("loop", "stop_at"),
    [
        (sums_with_a_graph, 20),
        (sums_with_a_graph, 24),  # behind the last batch of an epoch
        (plateaus, 11),
        (uncounted, 4),
        (inference, 4),
        (inference, 12),
        (expanded, 4),
        (trained_attribute, 4),
        (summed, 6),
        (half_a_step, 20),
        (judged, 3),
        (in_containers, 5),
        (chosen, 5),
        (chosen, 8),
    ],
)
def test_it_ends_as_if_it_was_not_preempted(preempted: Any, loop: Any, stop_at: int) -> None:
    assert preempted.differ(loop, stop_at) == []
