"""Finds tensors that a call has left where the script or the next call can read them.

A forward may keep what it computes on its module, in an object or a closure, on a class or in a
global, or return it inside of an object that can't be copied. Only memory is compared: a tensor in
memory that could not be reached before the call was made by it. Nothing is kept alive, and no value
is read, for which a GPU would have to be waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from fasttrain.shim.hooks.containers import CLOSED, Child, children_of, map_tensors, tensors_in

UNCOPIED = "not all of them can be copied"
MOST_IN_A_SEARCH = 20_000  # objects; 0.5 us each
# What is searched for names of its own, or belongs to torch.
_TABLES = ("_parameters", "_buffers")
_LEFT_OUT = ("_modules", "_compiled_call_impl")
# Their threads put batches there while a call runs.
_LOADING = "torch.utils.data."

Labelled = tuple[str, Any]  # what a user knows an object by, and the object


class Look:
    """The memory that can be reached from a root before one of its calls.

    Args:
        module: The root.
        args: The arguments of the call.
        kwargs: The same, by name.
    """

    def __init__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = _search([*_starts(module), ("", args), ("", kwargs)])
        self._stand_in = torch.empty(0, device="cpu")
        tensors = [self._stand_in, *(tensor for _, tensor in found)]
        self._before = {None, *map(memory_of, tensors)}

    def left(self, module: Module, output: Any) -> str:
        """Return where the call has left a tensor; empty if it has only returned some.

        Args:
            module: The root.
            output: What the call has returned.
        """
        if where := self._new(_starts(module)):
            return f"{type(module).__name__} keeps a tensor of its call in {where}"
        if self._copies(output):
            return ""
        return f"{type(module).__name__} returns tensors in a {type(output).__name__}: {UNCOPIED}"

    def _copies(self, output: Any) -> bool:
        """True if `map_tensors` can replace all tensors that the call has made."""
        try:
            rest = map_tensors(output, lambda _: self._stand_in)
        except Exception:  # noqa: BLE001 - containers of any kind
            return False
        replaced = all(tensor is self._stand_in for tensor in tensors_in(rest))
        return replaced and not self._new([("output", rest)])

    def _new(self, starts: Iterable[Labelled]) -> str:
        for label, tensor in _search(starts):
            if memory_of(tensor) not in self._before:
                return label
        return ""


def memory_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's memory; None if it has none, such as a sparse one."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return None


def _starts(module: Module) -> list[Labelled]:
    """Return what the modules of a root hold, each with its class and attribute."""
    parts = list(Module.modules(module))
    starts: list[Labelled] = []
    for part in parts:
        name = type(part).__name__
        for attribute, value in list(vars(part).items()):
            if attribute in _TABLES:
                starts += [(f"{name}.{key}", held) for key, held in list(value.items())]
            elif attribute not in _LEFT_OUT:
                starts.append((f"{name}.{attribute}", value))
    kinds = {type(part) for part in parts}
    return starts + [(kind.__name__, kind) for kind in kinds]


def _search(starts: Iterable[Labelled]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that can be reached, those nearest to the starts first."""
    pending = deque(starts)
    seen: set[int] = set()
    kept: list[Any] = []  # references, so that no id is used twice
    while pending and len(seen) < MOST_IN_A_SEARCH:
        label, found = pending.popleft()
        kind = type(found)  # not its __class__, which a proxy may fake
        if issubclass(kind, Tensor):
            yield label, found
            pending.extend((label, held) for held in list(vars(found).values()))
        elif id(found) not in seen and not _is_closed(kind):
            seen.add(id(found))
            kept.append(found)
            pending.extend(_children(label, found, kind))


def _is_closed(kind: type) -> bool:
    return issubclass(kind, CLOSED) or kind.__module__.startswith(_LOADING)


def _children(label: str, holder: Any, kind: type) -> list[Labelled]:
    try:
        children = children_of(holder, kind)
    except Exception:  # noqa: BLE001 - other threads, and classes of any kind
        return []
    if kind is dict and "__builtins__" in holder:
        # Dynamo puts its graphs there, whose names begin with two underscores.
        named = [(_key(child), child[0]) for child in children]
        return [(f"the global {key}", held) for key, held in named if not key.startswith("__")]
    if issubclass(kind, type):
        return [(f"{holder.__name__}.{_key(child)}", child[0]) for child in children]
    return [(label, child) for child, _ in children]


def _key(child: Child) -> str:
    """Return the name under which a dictionary or class holds an object."""
    return str(getattr(child[1], "args", ("", ""))[1])
