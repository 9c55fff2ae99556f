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

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fasttrain.shim.hooks.lifted import lift
from fasttrain.shim.hooks.reachable import CLOSED, Put, children_of

MOST_IN_A_SEARCH = 20_000  # objects; 0.5 us each
MOST_IN_ALL = 400_000


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
                children = children_of(holder, type(holder))
            except Exception:  # noqa: BLE001, S112 - other threads, and classes of any kind
                continue
            for child, put in children:
                kind = type(child)  # whatever it says that it is
                if issubclass(kind, Tensor):
                    if child.dtype is self._dtype:
                        found.append((child, put))
                elif id(child) not in seen and not issubclass(kind, CLOSED):
                    seen.add(id(child))
                    kept.append(child)
                    pending.append(child)
        return found


def _put(put: Put, value: Any) -> None:
    """Replace what an object holds; one that refuses keeps it, and its root is told of alike."""
    with suppress(Exception):
        put(value)
