"""Whether a call changes anything outside of the modules that it is made of.

A forward may count its calls in a global, append to a list, or write into a tensor that a closure
holds. Such a call can't be made a second time for a comparison, and what it keeps would be of one
rank's rows: it isn't split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

from fasttrain.shim.reachable import CLOSED, children_of

MOST = 20_000  # objects of a search; 0.5 us each
_SMALL = 1 << 16  # bytes of an array that is looked at
_BY_VALUE = (bool, int, float, str, bytes, complex)


class Surroundings:
    """What can be reached from a call, at one moment.

    Args:
        module: The root.
        starts: Its arguments.
    """

    def __init__(self, module: Module, *starts: Any) -> None:
        # Attributes of the modules are looked at by themselves.
        own = list(Module.modules(module))
        self._own = {id(vars(part)) for part in own}
        for part in own:
            self._own |= {id(part._buffers), id(part._parameters), id(part._modules)}
            self._own |= {id(buffer) for buffer in part._buffers.values()}
        self._holders: list[tuple[Any, list[Any]]] = []
        self._search([module, *starts])

    def changed(self) -> str:
        """Return the kind of the first object that holds something else now; empty for none."""
        for holder, before in self._holders:
            now = _contents(holder)
            if len(now) != len(before) or not all(map(_same, now, before)):
                return type(holder).__name__
        return ""

    def _search(self, starts: Iterable[Any]) -> None:
        pending = deque(starts)
        seen = {id(start) for start in pending}
        while pending and len(seen) < MOST:
            holder = pending.popleft()
            try:
                children = _held_by(holder)
            except Exception:  # noqa: BLE001, S112 - other threads, and classes of any kind
                continue
            if id(holder) not in self._own:
                self._holders.append((holder, _contents(holder)))
            for child in children:
                if id(child) not in seen and _is_open(child):
                    seen.add(id(child))
                    pending.append(child)


def _held_by(holder: Any) -> list[Any]:
    return [child for child, _ in children_of(holder, type(holder))]


def _is_open(child: Any) -> bool:
    kind = type(child)  # whatever it says that it is
    return issubclass(kind, Tensor) or not issubclass(kind, CLOSED)


def _contents(holder: Any) -> list[Any]:
    if isinstance(holder, Tensor):
        return [0 if holder.is_inference() else holder._version]
    kind = type(holder)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return [holder.tobytes() if holder.nbytes <= _SMALL else 0]
    if isinstance(holder, dict):
        return [x for k, v in dict.items(holder) if k != "__warningregistry__" for x in (k, v)]
    if isinstance(holder, set | frozenset):
        return [len(holder)]
    if isinstance(holder, list | tuple | deque):
        return list(holder)
    try:
        return _held_by(holder)
    except Exception:  # noqa: BLE001 - as above
        return []


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _BY_VALUE and one == other)
