"""What was found about one kind of call, and when it is to be verified again."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.nn import Module

from fasttrain.shim.data_parallel.split.ways import Split

# What a forward may decide by that is no argument: attributes of its modules, and globals.
#
# A call in which one of these is another one than in all verified calls is verified as well.


_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_SIMPLE = (bool, int, float, str, type(None))
_FACTOR = "\0a factor"  # in the place of any other number
MOST = 64  # values that are looked at before each call
Place = tuple[dict[str, Any], str, Any]  # a dictionary, a name in it, and a class that may have it


class Decisions:
    """The values that the modules of a root may decide by.

    Args:
        module: The root.
    """

    def __init__(self, module: Module) -> None:
        self._places: list[Place] = []
        for place in _places(module):
            if len(self._places) == MOST:
                break
            self._places.append(place)

    def values(self) -> tuple[Any, ...]:
        """Return the values as they are."""
        values = [
            slot[name] if name in slot else getattr(kind, name, None)
            for slot, name, kind in self._places
        ]
        return tuple(map(_told, (value for value in values if isinstance(value, _SIMPLE))))


def _told(value: Any) -> Any:
    """Return a value as far as a forward may decide by it: of a factor, whether it is 0 or 1."""
    return value if type(value) is not float or value in (0.0, 1.0) else _FACTOR


def may_print(module: Module) -> str:
    """Return the first class of a root's whose code has a call of print in it; empty for none."""
    for function in _functions(module):
        if "print" in function.__code__.co_names:
            return function.__qualname__
    return ""


def _places(module: Module) -> Iterator[Place]:
    parts = list(Module.modules(module))
    for part in parts:
        yield (vars(part), "training", None)
    for function in _functions(module):
        values = function.__globals__
        for name in function.__code__.co_names:
            if isinstance(values.get(name, values), _SIMPLE):
                yield (values, name, None)
    for part in parts:
        for name in _names(type(part)):
            if isinstance(vars(part).get(name, getattr(type(part), name, _names)), _SIMPLE):
                yield (vars(part), name, type(part))


def _names(kind: type) -> list[str]:
    """Return the names in the code of a class of the script's."""
    functions = [f for base in kind.__mro__ if _is_scripts(base) for f in _methods(base)]
    return sorted({name for function in functions for name in function.__code__.co_names})


def _methods(kind: type) -> list[FunctionType]:
    found = [f for f in vars(kind).values() if isinstance(f, FunctionType)]
    return [f for f in found if f.__name__ != "__init__"]


def _functions(module: Module) -> Iterator[FunctionType]:
    """Yield the methods of the script's own classes among those of a root's modules."""
    kinds = {kind for part in Module.modules(module) for kind in type(part).__mro__}
    for kind in sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"):
        if _is_scripts(kind):
            yield from _methods(kind)


def _is_scripts(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None) or ("" if kind.__module__ == "__main__" else "<")
    return not path.startswith((*_INSTALLED, "<"))


SHAPES = 4  # new shapes of one kind of call that are verified; behind them 8, 16, ... of them
MOST_SHAPES = 4096  # that are remembered
RETRIES = 4  # calls up to which a reason other than wrong numbers may go away


@dataclass(slots=True)
class Site:
    """One kind of call of one root: its mode, and the kinds of its arguments.

    Attributes:
        calls: How often it was called.
        split: How it is split; None where it isn't.
        why_not: Why it isn't.
        final: Whether no other way will be tried.
        name: The module, and where its root was called first.
        verified: How often the split call was found to be the whole one.
        shapes: Of the arguments, with what the call may decide by, as far as they were met.
        decisions: What that is.
        hooks: Hooks that had been registered anywhere when it was verified.
    """

    name: str
    calls: int = 0
    split: Split | None = None
    why_not: str = ""
    final: bool = False
    verified: int = 0
    shapes: set[Any] = field(default_factory=set)
    hooks: int = -1
    decisions: Decisions | None = None

    def is_due(self, shapes: Any, hooks: int) -> bool:
        """Count a call, and return whether it is to be verified."""
        self.calls += 1
        new = shapes not in self.shapes and len(self.shapes) < MOST_SHAPES
        if new:
            self.shapes.add(shapes)
        if self.final:
            return False
        often = len(self.shapes)
        again = not self.calls & (self.calls - 1) or (
            new and (often <= SHAPES or not often & (often - 1))
        )
        if self.split is None and self.why_not:
            return again and self.calls <= RETRIES
        return again or hooks != self.hooks


def saved(site: Site) -> dict[str, Any]:
    """Return what a snapshot holds of what was found."""
    split = site.split
    return {
        "calls": site.calls,
        "split": split and [split.inputs, split.outputs, split.kept, split.inner, split.same],
        "why_not": site.why_not,
        "final": site.final,
        "verified": site.verified,
        "shapes": [(tuple(map(tuple, shapes)), values) for shapes, values in site.shapes],
    }


def fill(site: Site, state: dict[str, Any]) -> None:
    """Go on from what `saved` returned."""
    site.split = Split(*state["split"]) if state["split"] else None
    site.shapes = {
        (tuple(map(torch.Size, shapes)), tuple(values)) for shapes, values in state["shapes"]
    }
    for name in ("calls", "why_not", "final", "verified"):
        setattr(site, name, state[name])
