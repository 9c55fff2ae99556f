"""The decision for each kind of call of a root, and when it has to be verified again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.nn import Module

from fasttrain.shim.data_parallel.split.ways import Split
from fasttrain.shim.hooks.reachable import is_scripts

_SIMPLE = (bool, int, float, str, type(None))
_FACTOR = "\0a factor"  # stands for any float but 0 and 1
MOST = 64  # values compared before each call
Place = tuple[dict[str, Any], str, Any]  # a dictionary, a name in it, and a class that may have it


class Decisions:
    """Values other than arguments on which a forward may branch: attributes of modules, globals.

    A call with other values than all verified calls has to be verified, too.

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
        """Return the present values."""
        values = [
            slot[name] if name in slot else getattr(kind, name, None)
            for slot, name, kind in self._places
        ]
        return tuple(map(_category, (value for value in values if isinstance(value, _SIMPLE))))


def _category(value: Any) -> Any:
    """Return what a forward may branch on: of a float, only whether it is 0, 1 or another one."""
    return value if type(value) is not float or value in (0.0, 1.0) else _FACTOR


def may_print(module: Module) -> str:
    """Return the root's first method whose code calls print; empty if there is none."""
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
    """Return the names that the code of one of the script's classes uses."""
    functions = [f for base in kind.__mro__ if _is_scripts(base) for f in _methods(base)]
    return sorted({name for function in functions for name in function.__code__.co_names})


def _methods(kind: type) -> list[FunctionType]:
    found = [f for f in vars(kind).values() if isinstance(f, FunctionType)]
    return [f for f in found if f.__name__ != "__init__"]


def _functions(module: Module) -> Iterator[FunctionType]:
    """Yield the methods of a root's modules whose classes are the script's own."""
    kinds = {kind for part in Module.modules(module) for kind in type(part).__mro__}
    for kind in sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"):
        if _is_scripts(kind):
            yield from _methods(kind)


def _is_scripts(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None) or ("" if kind.__module__ == "__main__" else "<")
    return is_scripts(path)


SHAPES = 4  # the first new shapes of a kind of call are verified; after them the 8th, 16th, ...
MOST_SHAPES = 4096  # remembered per kind of call
RETRIES = 4  # calls after which a refusal becomes final, even if numbers weren't wrong


@dataclass(slots=True)
class CallSite:
    """One kind of call of one root: its mode, and the kinds of its arguments.

    Attributes:
        calls: Number of calls.
        split: How it is split; None if it isn't.
        why_not: Why it isn't.
        final: True if no other way will be tried.
        name: The module, and the line at which its root was first called.
        verified: How often the split call agreed with the whole one.
        shapes: Shapes of arguments so far, each with the values that the call may branch on.
        decisions: Reads those values.
        hooks: Number of hooks registered anywhere when it was last verified.
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
        """Count a call; return True if it has to be verified."""
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


def saved(site: CallSite) -> dict[str, Any]:
    """Return a decision as a snapshot holds it."""
    split = site.split
    return {
        "calls": site.calls,
        "split": split and [split.inputs, split.outputs, split.kept, split.inner, split.same],
        "why_not": site.why_not,
        "final": site.final,
        "verified": site.verified,
        "shapes": [(tuple(map(tuple, shapes)), values) for shapes, values in site.shapes],
    }


def fill(site: CallSite, state: dict[str, Any]) -> None:
    """Restore a result of `saved`."""
    site.split = Split(*state["split"]) if state["split"] else None
    site.shapes = {
        (tuple(map(torch.Size, shapes)), tuple(values)) for shapes, values in state["shapes"]
    }
    for name in ("calls", "why_not", "final", "verified"):
        setattr(site, name, state[name])
