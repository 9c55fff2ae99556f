"""Whether a call changes anything outside of the modules that it is made of.

A forward may count its calls in a global, append to a list, or write into a tensor that a closure
holds. Such a call can't be made a second time for a comparison, and what it keeps would be of one
rank's rows: it isn't split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from fasttrain.shim.data_parallel.hidden_state import (
    generator_state,
    hidden_state,
    put_generator_state,
)
from fasttrain.shim.data_parallel.tensor_sums import sums_of
from fasttrain.shim.reachable import CLOSED, children_of

MOST = 20_000  # objects of a search; 0.5 us each
_SMALL = 1 << 16  # bytes of an array that is looked at
MOST_TENSORS = 500  # that are summed, those that are reached first
_BY_VALUE = (bool, int, float, str, bytes, complex, set)
_REGISTRY = "__warningregistry__"


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
        self._tensors: list[Tensor] = []
        self._search([module, *starts])
        self._sums = sums_of(self._tensors)

    def changed(self) -> str:
        """Return the kind of the first object that holds something else now; empty for none."""
        for holder, _ in self._others():
            return type(holder).__name__
        return "Tensor" if sums_of(self._tensors) != self._sums else ""

    def restore(self) -> bool:
        """Put back what containers held and where generators were; return whether that is all."""
        for holder, before in list(self._others()):
            with suppress(Exception):  # of classes of any kind
                _put_back(holder, before)
        return not self.changed()

    def _others(self) -> Iterator[tuple[Any, list[Any]]]:
        for holder, before in self._holders:
            now = _contents(holder)
            if len(now) != len(before) or not all(map(_same, now, before)):
                yield holder, before

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
                if _is_summed(holder) and len(self._tensors) < MOST_TENSORS:
                    self._tensors.append(holder)
            for child in children:
                if id(child) not in seen and _is_open(child):
                    seen.add(id(child))
                    pending.append(child)


def _held_by(holder: Any) -> list[Any]:
    return [child for child, _ in children_of(holder, type(holder))]


def _is_open(child: Any) -> bool:
    kind = type(child)  # whatever it says that it is
    return issubclass(kind, Tensor) or not issubclass(kind, CLOSED)


def _is_summed(holder: Any) -> bool:
    # A parameter is summed with the root's; what is of no size, or of no device, has no sum.
    kinds = isinstance(holder, Tensor) and type(holder) in (Tensor, Parameter)
    return kinds and holder.numel() <= _SMALL and holder.device.type != "meta"


def _contents(holder: Any) -> list[Any]:
    if isinstance(holder, Tensor):
        return [0 if holder.is_inference() else holder._version]
    kind = type(holder)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return [holder.tobytes() if holder.nbytes <= _SMALL else 0]
    if isinstance(holder, dict):
        return [x for k, v in dict.items(holder) if k != _REGISTRY for x in (k, v)]
    if isinstance(holder, set | frozenset):
        return [set(holder)]
    if isinstance(holder, list | tuple | deque):
        return list(holder)
    try:
        if state_of := generator_state(holder):
            return [state_of]
        return hidden_state(holder) or _held_by(holder)
    except Exception:  # noqa: BLE001 - as above
        return []


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _BY_VALUE and one == other)


def _put_back(holder: Any, before: list[Any]) -> None:
    """Have a container hold what it held, and a generator of random numbers be where it was."""
    if isinstance(holder, dict):
        for key in [key for key in dict.keys(holder) if key != _REGISTRY]:
            del holder[key]
        for key, value in zip(before[::2], before[1::2], strict=True):  # in their order
            holder[key] = value
    elif isinstance(holder, set):
        holder.clear()
        holder.update(before[0])
    elif isinstance(holder, list | deque):
        holder.clear()
        holder.extend(before)
    elif before:
        put_generator_state(holder, before[0])
