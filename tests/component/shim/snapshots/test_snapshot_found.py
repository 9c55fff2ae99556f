"""Where tensors that a script carries are looked for, and what is refused when one is not there."""

from __future__ import annotations

import threading
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fasttrain.shim.snapshots import script_tensors
from fasttrain.shim.snapshots.script_tensors import ScriptTensors

T = torch.ones(2)
MANY = 10_001  # more items than one looks into


class Own:
    """Of a class of the script's own."""

    def __init__(self, kept: Any = T) -> None:
        self.kept = kept


class OneSlot:
    __slots__ = "kept"  # noqa: PLC0205 - a single one may be written so

    def __init__(self) -> None:
        self.kept = T


class TwoSlots(OneSlot):
    __slots__ = ("unset", "within")

    def __init__(self) -> None:
        super().__init__()
        self.within = [T + 1]


def generator() -> Iterator[Any]:
    kept = torch.ones(2)
    yield kept


def waiting() -> Iterator[Any]:
    begun = generator()
    next(begun)
    return begun


def ended() -> Iterator[Any]:
    begun = waiting()
    assert next(begun, None) is None
    return begun


def thread() -> Any:
    made = threading.Thread()
    made.kept = T  # type: ignore[attr-defined]
    return made


def ring() -> list[Any]:
    items: list[Any] = [T]
    items.append(items)
    return items


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Look into one value and nothing else."""
    monkeypatch.setattr(script_tensors, "_variables", list)

    def look(value: Any) -> ScriptTensors:
        return ScriptTensors(lambda: [("x", value)])

    return look


@pytest.mark.parametrize(
    ("value", "places"),
    [
        ({"a": T}, ["x.a"]),
        (((T,),), ["x.0.0"]),
        (deque([1, T]), ["x.1"]),
        (SimpleNamespace(a=T), ["x.a"]),
        (Namespace(a=T), ["x.a"]),
        (Own([Own()]), ["x.kept.0.kept"]),
        (OneSlot(), ["x.kept"]),
        (TwoSlots(), ["x.within.0", "x.kept"]),
        (waiting(), ["x.kept"]),
        ([0.5] * MANY + [T], [f"x.{MANY}"]),
        (TensorDataset(T), ["data set (x).tensors.0"]),
        ([T, T], ["x.0"]),
        (ring(), ["x.0"]),
    ],
)
def test_where_tensors_are_found(holds: Any, value: Any, places: list[str]) -> None:
    assert list(holds(value).state()) == places


@pytest.mark.parametrize(
    "value",
    [
        nn.Linear(2, 2),
        [nn.Parameter(T)],
        [T, *[0.5] * MANY],
        dict.fromkeys(range(MANY), T),
        ended(),
        thread(),
        Own(Own(Own(Own(Own(Own(Own())))))),
    ],
    ids=["module", "parameter", "long", "large", "ended", "thread", "deep"],
)
def test_where_none_is_looked_for(holds: Any, value: Any) -> None:
    assert holds(value).state() == {}


def test_what_has_not_changed_is_left_out(holds: Any) -> None:
    there = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    kept = holds(there)
    kept.begin()
    there["a"].add_(1)
    there["b"] = torch.ones(2)
    assert list(kept.state()) == ["x.a", "x.b"]


def test_what_there_was_is_not_kept_alive(holds: Any) -> None:
    there = {"a": torch.ones(2)}
    kept, ref = holds(there), weakref.ref(there["a"])
    kept.begin()
    there.clear()
    assert ref() is None


def test_variables_are_not_kept_alive() -> None:
    def dropped() -> bool:
        tensor = torch.ones(2)
        ScriptTensors(list).begin()
        ref = weakref.ref(tensor)
        del tensor
        return ref() is None

    def asked() -> Any:
        tensor = T
        variables = locals()
        ScriptTensors(list).begin()
        return variables["tensor"] is tensor

    assert dropped()
    assert asked()


def test_values_are_put_back(holds: Any) -> None:
    saved = holds({"a": torch.full((2,), 3.0)}).state()
    there = torch.zeros(2)
    holds({"a": there}).restore(saved)
    assert there.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("there", [{}, {"b": T}])
def test_one_that_is_missing_is_refused(holds: Any, there: Any, capfd: Any) -> None:
    saved = holds({"a": torch.ones(2)}).state()
    with pytest.raises(SystemExit):
        holds(there).restore(saved)
    said = capfd.readouterr().err
    assert " x.a " in said
    assert "[snapshot-diverged]" in said


def test_what_a_data_set_keeps_of_being_read_comes_again(holds: Any) -> None:
    data = TensorDataset(T)
    data.read = [torch.ones(2)]  # type: ignore[attr-defined]
    saved = holds(data).state()
    assert "data set (x).read.0" in saved
    holds(TensorDataset(T)).restore(saved)
