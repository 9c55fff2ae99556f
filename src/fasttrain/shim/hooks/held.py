"""Finds what datasets and collate functions hold, also by closures, classes and globals."""

from __future__ import annotations

import dis
import functools
import inspect
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fasttrain.shim.hooks.containers import CLOSED, children_of
from fasttrain.shim.process.callsite import own_prefixes

MOST = 5_000  # objects per search
_READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")  # co_names has the names of attributes, too
_SKIPPED = (*(kind for kind in CLOSED if kind is not Tensor), DataLoader, _BaseDataLoaderIter)


def held_by(*holders: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each object, itself included, with what it holds directly; at most `MOST` of them."""
    pending = deque(holders)
    seen = {id(start) for start in pending}
    while pending and len(seen) < MOST:
        holder = pending.popleft()
        children = held_directly(holder)
        yield holder, children
        for child in children:
            if id(child) not in seen and not issubclass(type(child), _SKIPPED):
                seen.add(id(child))
                pending.append(child)


def held_directly(holder: Any) -> list[Any]:
    """Return what an object holds directly; nothing if that can't be found."""
    try:
        return list(_children(holder))
    except Exception:  # noqa: BLE001 - objects of any kind
        return []


def _children(holder: Any) -> Iterator[Any]:
    kind = type(holder)
    if kind is FunctionType:
        yield from holder.__defaults__ or ()
        yield from holder.__closure__ or ()
        if not holder.__code__.co_filename.startswith(own_prefixes()):
            names = _names(holder.__code__)
            yield from (v for k, v in holder.__globals__.items() if k in names)
    elif kind.__module__ == "numpy":
        if kind.__name__ != "memmap":  # its base is a mapped file, which all ranks can read
            yield getattr(holder, "base", None)
    elif kind is memoryview:
        yield holder.obj
    elif kind is not Tensor:
        yield from (child for child, _ in children_of(holder, kind))


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals that a function uses, and the functions inside of it."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in _READS_GLOBAL}
    inner = (_names(const) for const in code.co_consts if inspect.iscode(const))
    return frozenset(found.union(*inner))
