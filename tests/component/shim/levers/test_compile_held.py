"""What a call leaves where later code can read it is found, without reading or keeping it."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.levers.compile.graph_memory import Look

Pair = namedtuple("Pair", "a b")
KEPT: dict[str, Any] = {}


class Plain:
    def __init__(self, value: Any = None) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)


class Part(nn.Linear):
    pass


class Root(nn.Module):
    before: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.part = Part(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.plain, self.slotted, self.items = Plain(), Slotted(), {"list": [0]}
        self.queue: deque[Any] = deque(maxlen=2)
        self.pair: Any = None
        cell: Any = None

        def hook(*_: Any) -> Any:
            return cell

        def keep(tensor: Any) -> None:
            nonlocal cell
            cell = tensor

        self.keep = keep
        self.part.register_forward_hook(hook)

    def forward(self) -> Any:
        return KEPT


def on_global(_root: Root, tensor: Tensor) -> None:
    KEPT["kept"] = Plain([tensor])


def on_class(_root: Root, tensor: Tensor) -> None:
    Root.before = tensor


def on_data(root: Root, tensor: Tensor) -> None:
    root.mean.data = tensor


def on_parameter(root: Root, tensor: Tensor) -> None:
    root.part.weight.before = tensor  # type: ignore[attr-defined]


PLACES: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda root, t: setattr(root, "mem", t), "Root.mem"),
    (lambda root, t: setattr(root, "mean", t), "Root.mean"),
    (on_data, "Root.mean"),
    (lambda root, t: setattr(root.part, "mem", t), "Part.mem"),
    (lambda root, t: setattr(root, "pair", (0, t)), "Root.pair"),
    (lambda root, t: setattr(root, "pair", Pair(0, {"t": {t}})), "Root.pair"),
    (lambda root, t: root.queue.append(t), "Root.queue"),
    (lambda root, t: root.items["list"].append(t), "Root.items"),
    (lambda root, t: setattr(root.plain, "value", Plain(t)), "Root.plain"),
    (lambda root, t: setattr(root.slotted, "value", t), "Root.slotted"),
    (lambda root, t: setattr(root, "pair", lambda: t), "Root.pair"),
    (lambda root, t: root.keep(t), "Root.keep"),
    (on_parameter, "Part.weight"),
    (on_class, "Root.before"),
    (on_global, "the global KEPT"),
]


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    KEPT.clear()
    Root.before = None


@pytest.fixture
def root() -> Root:
    return Root()


def look(root: nn.Module, *args: Any) -> Look:
    return Look(root, args, {})


@pytest.mark.parametrize(("leave", "place"), PLACES, ids=[str(n) for n in range(len(PLACES))])
def test_what_a_call_leaves_is_found_by_its_place(root: Root, leave: Any, place: str) -> None:
    before = look(root)
    leave(root, torch.ones(2))
    assert before.left(root, None).endswith(f" {place}")


def test_what_was_there_before_is_not_new(root: Root) -> None:
    x = torch.ones(2)
    before = look(root, [x])
    root.x = x.view(1, 2)
    root.weight = root.part.weight.detach().t()  # type: ignore[assignment]
    root.mean.mul_(2).add_(x)
    root.mean.data = root.mean.data.view(2)
    assert before.left(root, (x, root.part.weight)) == ""


@dataclass(frozen=True)
class Fields:
    out: Any


MADE = [
    lambda t: t, lambda t: (t, [t]), lambda t: {"a": deque([t])}, lambda t: Pair(t, 1),
    lambda t: OrderedDict(a=t), lambda t: UserDict({"a": t}), lambda t: Fields(Fields(t)),
    lambda t: SimpleNamespace(a=t), lambda t: Normal(t, t), lambda t: torch.max(t[None], 0),
]  # fmt: skip
UNCOPIED: list[Callable[[Tensor], Any]] = [
    Plain, lambda t: [Plain(t)], lambda t: Fields(Plain(t)), lambda t: {t},
    lambda t: MappingProxyType({"a": t}), lambda t: lambda: t, lambda t: (t, Fields([Plain(t)])),
]  # fmt: skip


@pytest.mark.parametrize("make", MADE, ids=[str(n) for n in range(len(MADE))])
def test_outputs_that_can_be_copied_are_no_danger(root: Root, make: Any) -> None:
    before = look(root)
    assert before.left(root, make(torch.ones(2))) == ""


@pytest.mark.parametrize("make", UNCOPIED, ids=[str(n) for n in range(len(UNCOPIED))])
def test_outputs_that_cannot_be_copied_are_found(root: Root, make: Any) -> None:
    before = look(root)
    assert type(make(torch.ones(2))).__name__ in before.left(root, make(torch.ones(2)))


def test_an_object_that_returns_its_inputs_is_no_danger(root: Root) -> None:
    x = torch.ones(2)
    before = look(root, x)
    assert before.left(root, Plain(x)) == ""


def test_nothing_is_kept_alive() -> None:
    root = Root()
    root.mem = torch.ones(2)
    before = look(root, torch.ones(2))
    before.left(root, Plain(torch.ones(2)))
    held = [weakref.ref(root.mem), weakref.ref(root.part.weight)]
    del root
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert before is not None


def test_nothing_is_computed_or_read(root: Root) -> None:
    """A GPU would have to be waited for."""
    ran = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    with Watched():
        before = look(root, tensor)
        root.mem = tensor
        before.left(root, {"a": tensor})
    assert ran == ["aten.empty.memory_format"]  # what stands in for outputs, on the CPU


def test_sparse_tensors_are_passed_over(root: Root) -> None:
    root.table = torch.eye(2).to_sparse()
    assert look(root).left(root, None) == ""
