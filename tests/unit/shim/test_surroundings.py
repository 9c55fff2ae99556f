"""What a call changes outside of its modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.surroundings import Surroundings

calls = 0
HISTORY: list[float] = []
BANK = torch.zeros(4)
SETTINGS = SimpleNamespace(step=0)
numpy: Any = pytest.importorskip("numpy")
COUNTS = numpy.zeros(3)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.log: list[float] = []
        self.kept = torch.zeros(2)


class Quiet(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sum()  # attributes are looked at by themselves
        return self.norm(self.linear(x))  # type: ignore[no-any-return]


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        return x


class Appends(Base):
    def forward(self, x: Tensor) -> Tensor:
        HISTORY.append(float(x.sum()))
        return x


class Logs(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1.0)
        return x


class Writes(Base):
    def forward(self, x: Tensor) -> Tensor:
        BANK[0] += 1
        return x


class Keeps(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        return x


class Sets(Base):
    def forward(self, x: Tensor) -> Tensor:
        SETTINGS.step += 1
        return x


class Tallies(Base):
    def forward(self, x: Tensor) -> Tensor:
        COUNTS[0] += 1
        return x


class OnItsClass(Base):
    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).seen += 1
        return x


class InAnArgument(Base):
    def forward(self, x: Tensor, out: dict[str, Any]) -> Tensor:
        out["x"] = x
        return x


@pytest.mark.parametrize("kind", [Counts, Appends, Logs, Writes, Keeps, Sets, Tallies, OnItsClass])
def test_changes_are_seen(kind: type[nn.Module]) -> None:
    module = kind()
    around = Surroundings(module, torch.ones(3, 2))
    assert around.changed() == ""
    module(torch.ones(3, 2))
    assert around.changed() != ""


def test_an_argument_that_is_filled_is_seen() -> None:
    module, out = InAnArgument(), {}  # type: ignore[var-annotated]
    around = Surroundings(module, out)
    module(torch.ones(1, 2), out)
    assert around.changed() == "dict"


def test_modules_are_looked_at_by_themselves() -> None:
    module = Quiet()
    around = Surroundings(module, torch.ones(3, 2))
    module(torch.ones(3, 2))
    assert around.changed() == ""


def test_a_closure_is_seen() -> None:
    found = []

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append(1)
            return x

    module = Inner()
    around = Surroundings(module)
    module(torch.ones(1))
    assert around.changed() == "list"
