"""Finds low-precision tensors that a root's call has left where the script can read them.

A forward may keep what it computes in a closure, on a class, or in an object inside an object: no
list of places is complete. So after each of the first calls all that the forward can reach is
searched: its modules and arguments, their classes, closures and globals, and what these hold.
Tensors that the call has left there are cast to fp32, and the root runs in the script's own
precision from then on, because a search after each call would cost too much.

Tensors that only the autograd graph holds, such as a checkpoint's, can't be found, and stay in low
precision.
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
        self._scripts: Any = WeakTensorKeyDictionary()  # tensors that were there before the call

    def note(self, *starts: Any) -> None:
        """Note the low-precision tensors that are there before a call: they stay as they are."""
        for tensor, _ in self._search(starts):
            self._scripts[tensor] = True

    def lift(self, *starts: Any) -> str:
        """Cast the tensors that the call has left; return what holds the last one, or empty."""
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
        kept: list[Any] = []  # references, so that no id is used twice
        while pending and len(seen) < MOST_IN_A_SEARCH and self._left > 0:
            self._left -= 1
            holder = pending.popleft()
            try:
                children = children_of(holder, type(holder))
            except Exception:  # noqa: BLE001, S112 - other threads, and classes of any kind
                continue
            for child, put in children:
                kind = type(child)  # not its __class__, which a proxy may fake
                if issubclass(kind, Tensor):
                    if child.dtype is self._dtype:
                        found.append((child, put))
                elif id(child) not in seen and not issubclass(kind, CLOSED):
                    seen.add(id(child))
                    kept.append(child)
                    pending.append(child)
        return found


def _put(put: Put, value: Any) -> None:
    """Replace what an object holds; if it refuses, the tensor stays in low precision there."""
    with suppress(Exception):
        put(value)
