"""Which calls are verified since something was registered on modules."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.data_parallel.split.call import SplitCalls
from fasttrain.shim.data_parallel.split.ways import Split

Change = Callable[[Any, Any], Any]
KERNEL = torch.ones(1, 1, 3, 3)


class Calls(SplitCalls):
    """Calls on two ranks, of which only is noted how they are made."""

    def __init__(self, recorder: Any, context: Any) -> None:
        super().__init__(recorder, context)
        self.made: list[str] = []
        self.other = nn.Sequential(nn.Linear(1, 1))  # no part of the root, but used in its calls

    def _verified(self, site: Any, *_: Any) -> None:  # type: ignore[override]
        self.made.append("verified")
        site.split, site.most_rows = Split((0,)), 8
        site.others = [weakref.ref(part) for part in self.other.modules()]

    def _split(self, *_: Any) -> None:  # type: ignore[override]
        self.made.append("split")


@pytest.fixture
def calls() -> Iterator[Calls]:
    ranks = SimpleNamespace(
        joined=True,
        rank=0,
        world_size=2,
        meet=lambda *_: True,
        spread=0.0,
        end_call=lambda: None,
        is_here=lambda: True,
    )
    context: Any = SimpleNamespace(
        roots=SimpleNamespace(inside=None), ranks=ranks, compiled=None,
        strategy=SimpleNamespace(collectives="gloo"),
        streams=SimpleNamespace(for_forward=lambda _: contextlib.nullcontext()),
    )  # fmt: skip
    recorder = SimpleNamespace(counts=Counter(), apply=lambda *_: None)
    with contextlib.ExitStack() as undo:
        calls = Calls(recorder, context)
        calls._hooks.install(undo)
        yield calls


def made(calls: Calls, change: Change) -> str:
    """Return how a third call is made, before which a script makes a change."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    root: Any = SimpleNamespace(
        ref=weakref.ref(module), name="Net", where="t.py:1", parameter=lambda: None, replica=None
    )
    x = torch.ones(8, 2)
    for number in range(3):
        kept = change(module, calls.other) if number == 2 else None
        calls.run(root, module, module, (x,), {})
    del kept
    assert calls.made[:2] == ["verified", "verified"]
    return calls.made[2]


def edges(*_: nn.Module) -> nn.Module:
    filtering = nn.Conv2d(1, 1, 3, bias=False)
    filtering.weight = nn.Parameter(KERNEL, requires_grad=False)
    filtering.register_forward_hook(print)
    return nn.Sequential(filtering, nn.ReLU())


def dropped(*_: nn.Module) -> None:
    edges()


@pytest.mark.parametrize("change", [edges, dropped, lambda *_: None])
def test_modules_that_are_made_apart_make_no_call_due(calls: Calls, change: Change) -> None:
    assert made(calls, change) == "split"


@pytest.mark.parametrize(
    "change",
    [
        lambda module, _: module.append(nn.Identity()),
        lambda module, _: module[1].register_forward_hook(print),
        lambda module, _: setattr(module[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda _, other: other[0].register_forward_pre_hook(print),
        lambda _, other: other.append(nn.Identity()),
    ],
)
def test_what_a_call_uses_makes_it_due(calls: Calls, change: Change) -> None:
    assert made(calls, change) == "verified"
