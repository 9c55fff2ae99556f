"""Tensors that modules, optimizers and data sets hold come back."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fasttrain.shim.snapshots.files import FoundSnapshot
from support.preempted import data, loss_of, network

Tick = Callable[[], None]


def train(optimizer: Any, loss: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Centred(nn.Module):
    """Keeps tensors in containers, which the script moves, and its own calls change."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.centres = [torch.zeros(3), torch.zeros(3)]
        self.average: dict[str, torch.Tensor] = {}
        self.calls: Any = deque([0], maxlen=2)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls.append(self.calls[-1] + len(x))
        return self.body(x)


def in_a_module(tick: Tick) -> Any:
    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data(), 8, shuffle=True):
        out = model(x)
        train(optimizer, sum((out[y == c] - model.centres[c] - 1).square().sum() for c in (0, 1)))
        with torch.no_grad():
            for c in (0, 1):
                model.centres[c] = 0.9 * model.centres[c] + 0.1 * out.detach()[y == c].sum(0)
            model.average["out"] = 0.9 * model.average.get("out", 0) + 0.1 * out.detach().sum(0)
        tick()
    return model.state_dict(), model.centres, model.average, list(model.calls)


class Shadow(nn.Module):
    """An average that is a module without a tensor that torch knows of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def forward(self, name: str, value: torch.Tensor) -> None:
        self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value.detach()


def in_a_module_alone(tick: Tick) -> Any:
    model = network()
    optimizer, shadow = torch.optim.SGD(model.parameters(), 0.1), Shadow(model)
    for x, y in DataLoader(data(), 8, shuffle=True):
        train(optimizer, loss_of(model, x, y))
        for name, parameter in model.named_parameters():
            shadow(name, parameter)
        tick()
    return model.state_dict(), shadow.shadow


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and holds slow weights in a list."""

    def __init__(self, parameters: Any, base: Any) -> None:
        super().__init__(parameters, {})
        self.base, self.steps = base, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)


def in_an_optimizer(tick: Tick) -> Any:
    model = network()
    parameters = list(model.parameters())
    optimizer = Lookahead(parameters, torch.optim.SGD(parameters, 0.1))
    for _ in range(2):
        for x, y in DataLoader(data(), 8, shuffle=True):
            train(optimizer, loss_of(model, x, y))
            tick()
    return model.state_dict(), optimizer.slow, optimizer.steps


def in_a_data_set(tick: Tick) -> Any:
    """Labels are made by the model, epoch for epoch."""
    x = data().tensors[0]
    samples = TensorDataset(x, torch.zeros(60))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        with torch.no_grad():
            samples.tensors = (x, torch.sigmoid(model(x).squeeze(1) + 1).square())
        for inputs, labels in DataLoader(samples, 8, shuffle=True):
            train(optimizer, loss_of(model, inputs, labels))
            tick()
    return model.state_dict()


class Growing:
    """A weight that grows with each call, for a while."""

    def __init__(self, steps: int) -> None:
        self.steps, self.calls, self.made_at = steps, 0, object()

    def __call__(self) -> float:
        self.calls += 1
        return min(1.0, self.calls / self.steps)


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


class Annealed(nn.Module):
    def __init__(self, weight: Growing) -> None:
        super().__init__()
        self.body, self.weight, self.rates = network(), weight, [Slotted()]

    def forward(self, x: torch.Tensor) -> Any:
        self.rates[0].rate *= 0.9
        return self.body(x) * self.weight() * self.rates[0].rate


def in_an_object_of_a_module(tick: Tick) -> Any:
    weight = Growing(20)
    model = Annealed(weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        for x, y in DataLoader(data(), 8, shuffle=True):
            train(optimizer, loss_of(model, x, y))
            tick()
    return model.state_dict(), weight.calls, weight.steps, model.rates[0].rate


class Caching(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return self.cache.setdefault(index, data()[index])


def cached(tick: Tick) -> Any:
    model, samples = network(), Caching()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(samples, 8, shuffle=True):
        train(optimizer, loss_of(model, x, y))
        tick()
    return model.state_dict()


@pytest.mark.parametrize(
    ("loop", "stop_at"),
    [
        (in_a_module, 5),
        (in_a_module_alone, 5),
        (in_an_optimizer, 10),
        (in_a_data_set, 10),
        (in_an_object_of_a_module, 12),
        (cached, 4),
    ],
)
def test_it_ends_as_if_it_was_not_preempted(preempted: Any, loop: Any, stop_at: int) -> None:
    assert preempted.differ(loop, stop_at) == []


def test_a_resumed_run_frees_what_the_script_drops(preempted: Any) -> None:
    def loop(tick: Tick) -> Any:
        model, refs = network(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in DataLoader(data(), 8, shuffle=True):
            loss = loss_of(model, x, y)
            refs += [weakref.ref(x), weakref.ref(loss)]
            train(optimizer, loss)
            tick()
        refs += [weakref.ref(it) for p in model.parameters() for it in (p, p.grad)]
        del model, optimizer, x, y, loss
        gc.collect()
        return sum(ref() is not None for ref in refs)

    assert preempted.attempt(loop, 0) == 0
    assert preempted.attempt(loop, 4) is None
    assert preempted.attempt(loop, 0, resume="required") == 0


def test_old_states_are_freed_before_the_saved_ones_are_read(
    preempted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[str, Any] = {}
    whole = FoundSnapshot.read

    def read(found: FoundSnapshot, name: str) -> Any:
        gradients = [p for p in held["parameters"] if p.grad is not None] if held else []
        held[name] = held and (len(held["optimizer"].state), len(gradients))
        return whole(found, name)

    def loop(tick: Tick) -> Any:
        model = network()
        held["parameters"] = list(model.parameters())
        held["optimizer"] = optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for x, y in DataLoader(data(), 8, shuffle=True):
            train(optimizer, loss_of(model, x, y))
            tick()
        return model.state_dict(), optimizer.state_dict()

    monkeypatch.setattr(FoundSnapshot, "read", read)
    assert preempted.differ(loop, 4) == []
    assert held["shared.pt"] == (0, 0)
