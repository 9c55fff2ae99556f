"""Finds low-precision tensors that a root's call has left anywhere in reach of the script.

A forward may keep what it computes in a closure, on a class, in an object inside of an object: no
list of places is complete. So the first calls are followed by a search through all that the forward
can reach: its modules and arguments, their classes, closures and globals, and what hangs on them.
What the call has left there is cast, and the root runs in the script's own precision from then on,
because a search after each call would cost too much.

What only the graph of gradients holds, such as what a checkpoint keeps, is out of reach, and stays
low.
"""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from operator import setitem
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fasttrain.shim.callsite import is_shim_code
from fasttrain.shim.lifted import lift

MOST_IN_A_SEARCH = 20_000  # objects; 0.5 us each
MOST_IN_ALL = 400_000
LONG = 1_000  # of a longer container the end is looked at
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_CLOSED = (Tensor, ModuleType, CodeType, FrameType, BuiltinFunctionType, str, bytes, int, float)
Put = Callable[[Any], None]
Child = tuple[Any, Put | None]  # and what puts another object in its place


class Reach:
    """Searches before and after a call.

    Args:
        dtype: The low precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._left = MOST_IN_ALL
        self._scripts: Any = WeakTensorKeyDictionary()  # that were there before

    def note(self, *starts: Any) -> None:
        """Note which low-precision tensors are there before a call."""
        for tensor, _ in self._search(starts):
            self._scripts[tensor] = True

    def lift(self, *starts: Any) -> str:
        """Cast those that a call has left; return where the last one was, or nothing."""
        where = ""
        for tensor, put in self._search(starts):
            if tensor not in self._scripts:
                holder = getattr(put, "args", ("a tuple",))[0]
                where = holder if isinstance(holder, str) else f"a {type(holder).__name__}"
                if put is not None:
                    _put(put, lift(tensor))
        return where

    def _search(self, starts: Iterable[Any]) -> list[tuple[Tensor, Put | None]]:
        found: list[tuple[Tensor, Put | None]] = []
        pending: deque[Any] = deque(starts)
        seen: set[int] = set()
        kept: list[Any] = []  # so that no id is given twice
        while pending and len(seen) < MOST_IN_A_SEARCH and self._left > 0:
            self._left -= 1
            holder = pending.popleft()
            try:
                children = _children(holder, type(holder))
            except Exception:  # noqa: BLE001, S112 - other threads, and classes of any kind
                continue
            for child, put in children:
                kind = type(child)  # whatever it says that it is
                if issubclass(kind, Tensor):
                    if child.dtype is self._dtype:
                        found.append((child, put))
                elif id(child) not in seen and not issubclass(kind, _CLOSED):
                    seen.add(id(child))
                    kept.append(child)
                    pending.append(child)
        return found


def _put(put: Put, value: Any) -> None:
    """Replace what an object holds; one that refuses keeps it, and its root is told of alike."""
    with suppress(Exception):
        put(value)


def _is_scripts(path: str) -> bool:
    return not path.startswith((*_INSTALLED, "<"))


def _children(holder: Any, kind: type) -> list[Child]:
    """Return what an object holds, each with what replaces it there."""
    if issubclass(kind, dict):
        pairs = reversed(dict.items(holder)) if len(holder) > LONG else dict.items(holder)
        return [(v, functools.partial(setitem, holder, k)) for k, v in islice(pairs, LONG)]
    if issubclass(kind, list | deque):
        begin = max(0, len(holder) - LONG)
        items = list(islice(holder, begin, None))
        return [(v, functools.partial(setitem, holder, i)) for i, v in enumerate(items, begin)]
    if issubclass(kind, tuple | set | frozenset):
        return [(value, None) for value in islice(holder, LONG)]
    if kind is CellType:
        return _attributes(holder, ["cell_contents"])
    if kind is FunctionType:
        return _of_function(holder)
    if kind is MethodType:
        return [(part, None) for part in (holder.__self__, holder.__func__)]
    if kind is functools.partial:
        return [(part, None) for part in (holder.func, holder.args, holder.keywords)]
    if kind is GeneratorType:
        return [(value, None) for value in gc.get_referents(holder)]
    if issubclass(kind, type):
        module = sys.modules.get(holder.__module__)
        scripts = _is_scripts(getattr(module, "__file__", None) or "<")
        return _attributes(holder, list(vars(holder))) if scripts else []
    return [] if kind.__module__.startswith("fasttrain.") else _inside(holder)


def _of_function(function: FunctionType) -> list[Child]:
    if is_shim_code(function.__code__):  # it stands for torch's own
        return []
    found: list[Child] = [(part, None) for part in (function.__closure__, vars(function))]
    scripts = _is_scripts(function.__code__.co_filename)
    return [*found, (function.__globals__, None)] if scripts else found


def _inside(holder: Any) -> list[Child]:
    """Return the attributes of an object, and its class."""
    try:
        found: list[Child] = [(object.__getattribute__(holder, "__dict__"), None)]
    except AttributeError:
        found = []
    slots = [name for kind in type(holder).__mro__ for name in _slots(kind)]
    return [*found, *_attributes(holder, slots), (type(holder), None)]


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def _attributes(holder: Any, names: list[str]) -> list[Child]:
    found: list[Child] = []
    for name in names:
        try:
            value = vars(holder)[name] if isinstance(holder, type) else getattr(holder, name)
        except (AttributeError, KeyError, ValueError):  # not set
            continue
        found.append((value, functools.partial(setattr, holder, name)))
    return found
