"""Memory of CUDA graphs that may still be in use: tensors that a call has left, and gradients."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fasttrain.shim.hooks.containers import (
    CLOSED,
    Child,
    children_of,
    map_tensors,
    module_name,
    tensors_in,
)

# Finds tensors that a call has left where the script or the next call can read them.
#
# A forward may keep what it computes on its module, in an object or a closure, on a class or in a
# global, or return it inside of an object that can't be copied. Only memory is compared: a tensor
# in memory that could not be reached before the call was made by it. Nothing is kept alive, and
# no value is read, for which a GPU would have to be waited for.


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
    return issubclass(kind, CLOSED) or module_name(kind).startswith(_LOADING)


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


# The gradients of a root whose calls are replayed as CUDA graphs.
#
# A replay's backward pass leaves gradients in the graph's memory, and the next replay overwrites
# them. A script may still have them then: it calls ``zero_grad()`` only after the forward, or
# lets gradients of several steps add up. What parameters have is copied to other memory before
# the replay, which takes one kernel. What the script holds elsewhere can't be exchanged.


ById = dict[int, weakref.ref[Tensor]]


class Gradients:
    """Watches the gradients of one root's parameters; keeps none alive."""

    def __init__(self) -> None:
        self._own: set[int] = set()  # ids of the root's parameters at its last call
        self._stepped: ById = {}  # gradients that steps were made with
        # Their memory, until there are graphs, which keep theirs.
        self._memories: set[StorageWeakRef | None] = set()
        self._outside: ById = {}  # present gradients in no graph's memory
        self._graphs = False

    def note(self, optimizer: Optimizer) -> bool:
        """Note the gradients of a step; return False if none belongs to the root."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        found = [p.grad for p in parameters if id(p) in self._own and p.grad is not None]
        self._stepped |= _by_id(found)
        if not self._graphs:
            self._memories.update(map(memory_of, found))
        return bool(found)

    def release(self, parameters: list[Parameter], *, replay: bool) -> bool:
        """Move the parameters' gradients out of memory that a call of the root will overwrite.

        Args:
            parameters: The root's.
            replay: Whether the call is one. Before the first replay no gradient lies in a graph's
                memory.

        Returns:
            False if the script holds a gradient of an earlier step elsewhere, which stays its own.
        """
        self._own = set(map(id, parameters))
        held = [p for p in parameters if p.grad is not None]
        if self._is_kept(held):
            return False
        inside = [p for p in held if self._graphs and not _has(self._outside, p.grad)]
        if inside and replay and not _move(inside):
            return False
        if replay or not self._graphs:
            self._outside = _by_id(p.grad for p in held)
        self._graphs = self._graphs or replay
        return True

    def _is_kept(self, held: list[Parameter]) -> bool:
        self._stepped = {key: ref for key, ref in self._stepped.items() if ref() is not None}
        if not self._stepped.keys() <= {id(p.grad) for p in held}:
            return True
        if self._graphs:
            self._memories.clear()
        self._memories = {m for m in self._memories if m is not None and not _is_free(m)}
        return not self._memories <= {memory_of(p.grad) for p in held if p.grad is not None}


def _move(parameters: list[Parameter]) -> bool:
    """Copy the gradients of parameters; return False if the script holds one of them, too."""
    old: list[Any] = [p.grad for p in parameters]
    refs = list(map(weakref.ref, old))
    with torch.no_grad():
        new = [torch.empty_like(gradient) for gradient in old]
        torch._foreach_copy_(new, old)
    del old
    for parameter, gradient in zip(parameters, new, strict=True):
        parameter.grad = gradient
    if all(ref() is None for ref in refs):
        return True
    for parameter, ref in zip(parameters, refs, strict=True):
        parameter.grad = parameter.grad if ref() is None else ref()
    return False


def _by_id(tensors: Iterable[Any]) -> ById:
    """Return weak references by ids: tensors can't be compared without computing."""
    return {id(tensor): weakref.ref(tensor) for tensor in tensors}


def _has(refs: ById, tensor: Any) -> bool:
    ref = refs.get(id(tensor))
    return ref is not None and ref() is tensor


def _is_free(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]
