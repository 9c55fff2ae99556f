"""What a call changes outside of its modules."""

from __future__ import annotations

import array
import copy
import gc
import io
import itertools
import logging
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.split.decisions import modules_in_globals
from fasttrain.shim.data_parallel.split.surroundings import GLOBAL, NEAR, CallSurroundings

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


class Inherits(Counts):
    """Has no function of its own by which the globals of its module could be found."""


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


@pytest.mark.parametrize(
    "kind", [Counts, Inherits, Appends, Logs, Writes, Keeps, Sets, Tallies, OnItsClass]
)
def test_changes_are_seen(kind: type[nn.Module]) -> None:
    module = kind()
    around = CallSurroundings(module, torch.ones(3, 2))
    assert around.changed() == ""
    module(torch.ones(3, 2))
    assert around.changed() != ""


def test_an_argument_that_is_filled_is_seen() -> None:
    module, out = InAnArgument(), {}  # type: ignore[var-annotated]
    around = CallSurroundings(module, out)
    module(torch.ones(1, 2), out)
    assert around.changed() == "dict"


def test_modules_are_looked_at_by_themselves() -> None:
    module = Quiet()
    around = CallSurroundings(module, torch.ones(3, 2))
    module(torch.ones(3, 2))
    assert around.changed() == ""


def test_a_closure_is_seen() -> None:
    found = []

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append(1)
            return x

    module = Inner()
    around = CallSurroundings(module)
    module(torch.ones(1))
    assert around.changed() == "list"


class Holding(Base):
    """Holds an object that its calls go on with."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


# What no attribute and no version tells: an object, and what a call does with it.
HIDDEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "pythons": (lambda: random.Random(1), lambda held: held.random()),
    "torchs": (torch.Generator, lambda held: torch.rand(1, generator=held)),
    "numpys": (lambda: numpy.random.default_rng(1), lambda held: held.random()),
    "legacy": (lambda: numpy.random.RandomState(1), lambda held: held.rand()),
    "cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "count": (lambda: itertools.count(), next),
    "items": (lambda: iter([1, 2, 3]), next),
    "enumerated": (lambda: enumerate(iter("abc")), next),
    "generator": (lambda: (n for n in range(9)), next),
    "over a generator": (lambda: enumerate(n for n in range(9)), next),
    "bytes": (lambda: bytearray(3), lambda held: held.__setitem__(0, 1)),
    "array": (lambda: array.array("i", [1, 2]), lambda held: held.__setitem__(0, 5)),
    "text": (io.StringIO, lambda held: held.write("x")),
    "data": (lambda: torch.ones(3), lambda held: held.data.mul_(2)),
    "bits": (lambda: torch.ones(3, dtype=torch.int8), lambda held: held.data.mul_(2)),
    "unordered": (lambda: {1, 2}, lambda held: held.symmetric_difference_update({2, 3})),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_hides_its_state_is_seen(kind: str) -> None:
    make, act = HIDDEN[kind]
    module = Holding(make())
    around = CallSurroundings(module)
    assert around.changed() == ""
    act(module.held)
    assert around.changed() != ""


def test_what_libraries_keep_is_their_own_affair() -> None:
    module = Holding(logging.Logger("calls"))
    around = CallSurroundings(module)
    module.held.filters.append(print)
    assert around.changed() == "list"
    assert around.changed(within=GLOBAL) == ""
    assert around.restore(within=GLOBAL)
    assert module.held.filters == [print]


def test_a_package_that_is_not_in_this_environment_keeps_its_own_names() -> None:
    path = "/home/me/.local/lib/python3.11/site-packages/library.py"
    names: dict[str, Any] = {"calls": 0}
    exec(compile("def count():\n    global calls\n    calls += 1\n", path, "exec"), names)
    around = CallSurroundings(Holding(names["count"]))
    names["count"]()
    assert around.changed() == ""


def test_a_metaclass_without_the_name_of_a_module_is_searched() -> None:
    # As Cython's has it, whose functions scikit-learn, pandas and SciPy keep.
    meta = type("Meta", (type,), {"__module__": property(str)})
    module = Holding(meta("Compiled", (), {}))
    around = CallSurroundings(module)
    assert around.changed() == ""


RESTORED: dict[str, tuple[Any, Callable[[Any], Any], Any]] = {
    "dict": (
        {"a": 1, "b": [2]},
        lambda held: (held.pop("a"), held.update(c=3)),
        {"a": 1, "b": [2]},
    ),
    "list": ([1, 2], lambda held: held.append(3), [1, 2]),
    "set": ({1, 2}, lambda held: held.add(3), {1, 2}),
    "nested": ([{1: [2]}], lambda held: held[0][1].append(5), [{1: [2]}]),
}


@pytest.mark.parametrize("kind", RESTORED)
def test_containers_are_put_back(kind: str) -> None:
    held, act, before = RESTORED[kind]
    module = Holding(held)
    around = CallSurroundings(module)
    act(held)
    assert held != before
    assert around.restore(within=GLOBAL)
    assert held == before
    assert module.held is held


def test_a_generator_is_put_back() -> None:
    module = Holding(torch.Generator().manual_seed(3))
    around = CallSurroundings(module)
    first = torch.rand(2, generator=module.held)
    assert around.restore(within=GLOBAL)
    assert torch.equal(torch.rand(2, generator=module.held), first)


def test_what_can_not_be_put_back_is_told() -> None:
    module = Holding(torch.ones(3))
    around = CallSurroundings(module)
    module.held.data.mul_(2)
    assert not around.restore(within=GLOBAL)


class Threaded(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(len(HISTORY))
        return x


def test_what_threads_may_change_is_left_alone() -> None:
    module = Threaded()
    around = CallSurroundings(module)
    HISTORY.append(1.0)
    assert around.changed(within=NEAR) == ""
    assert around.restore(within=NEAR)
    assert HISTORY.pop() == 1.0
    module.log.append(2.0)
    assert around.changed(within=NEAR) == "list"
    assert around.restore(within=NEAR)
    assert module.log == []


def test_weak_references_are_nobodys() -> None:
    class Kept:
        pass

    kept = Kept()
    module = Holding(weakref.WeakValueDictionary({1: kept}))
    around = CallSurroundings(module)
    del kept
    gc.collect()
    assert around.changed() == ""


class Result(dict[str, Tensor]):
    """What a model of transformers gives: a dict by subclass, which a trial copies."""


class Gives(Base):
    def forward(self, x: Tensor) -> Result:
        return Result(x=x)


def test_a_copy_of_what_it_gives_changes_no_class() -> None:
    module = Gives()
    around = CallSurroundings(module, torch.ones(3, 2))
    copy.copy(module(torch.ones(3, 2)))
    assert "__slotnames__" in vars(Result)
    assert around.changed() == ""


def test_a_default_argument_is_seen() -> None:
    def remember(value: int, seen: list[int] = []) -> int:  # noqa: B006 - as scripts have them
        seen.append(value)
        return len(seen)

    module = Holding(remember)
    around = CallSurroundings(module)
    module.held(1)
    assert around.changed() == "list"


NOT_NAMED = nn.Linear(2, 2)
HELD_BY_A_GLOBAL = {"head": nn.Sequential(nn.Linear(2, 2))}


class Borrows(Base):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.hidden = [teacher]  # none of its own parameters

    def forward(self, x: Tensor) -> Tensor:
        return HELD_BY_A_GLOBAL["head"](self.hidden[0](x))  # type: ignore[no-any-return]


def test_modules_that_are_used_without_being_parts_are_found() -> None:
    teacher, head = nn.Sequential(nn.ReLU()), HELD_BY_A_GLOBAL["head"]
    net = Borrows(teacher)
    assert set(CallSurroundings(net, torch.ones(1, 2)).modules()) == {teacher, teacher[0]}
    assert modules_in_globals(net) == [head, head[0]], "not the one that no method has a name for"
    assert CallSurroundings(nn.Sequential(nn.ReLU()), torch.ones(1, 2)).modules() == []


class Proxy:
    """As of Django and of torch itself: whatever it is asked for, it computes or warns first."""

    def __getattribute__(self, name: str) -> Any:
        ASKED.append(name)
        return object.__getattribute__(self, name)


ASKED: list[str] = []
PROXY = Proxy()


class Knows(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if PROXY else -x


def test_a_proxy_is_not_asked() -> None:
    module = Knows()
    module.log.append(PROXY)  # type: ignore[arg-type]
    ASKED.clear()  # by what collects tests
    around = CallSurroundings(module, {"a": PROXY, "b": (PROXY, [PROXY])})
    assert around.changed() == ""
    assert around.restore(within=GLOBAL)
    assert modules_in_globals(module) == []
    assert ASKED == []
