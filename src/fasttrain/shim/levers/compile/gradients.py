"""The gradients of a root whose calls are replayed as CUDA graphs.

A replay's backward pass leaves gradients in the graph's memory, and the next replay overwrites
them. A script may still have them then: it calls ``zero_grad()`` only after the forward, or lets
gradients of several steps add up. What parameters have is copied to other memory before the replay,
which takes one kernel. What the script holds elsewhere can't be exchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim import Optimizer

from fasttrain.shim.levers.compile.held import memory_of

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
