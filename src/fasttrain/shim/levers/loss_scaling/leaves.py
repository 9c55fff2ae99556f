"""Gradients that a backward pass leaves on tensors that belong to no optimizer and no module.

Such tensors are inputs of adversarial training, tensors that the script trains by hand, and those
with ``retain_grad()``. They are found before each backward pass by a walk through its graph, at
0.5 us a node. Gradients that they have from earlier passes are set aside, and never scaled.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.lifted import made_by
from fasttrain.shim.hooks.reachable import graph_behind
from fasttrain.shim.hooks.seams import Hooking
from fasttrain.shim.levers.loss_scaling.refusals import complex_refused
from fasttrain.shim.process.refusal import refuse


class OtherTensors:
    """Keeps the other tensors that get a gradient in the backward pass that is running."""

    def __init__(self) -> None:
        self._kept: dict[int, weakref.ref[Tensor]] = {}  # by retain_grad()
        # Weak references: re-entrant checkpoints make tensors during a pass and drop them.
        self._reached: dict[int, weakref.ref[Tensor]] = {}
        self._aside: list[tuple[Tensor, Tensor]] = []

    def install(self, undo: ExitStack) -> None:
        """Watch for calls of ``retain_grad()``."""
        patching.wrap(Tensor, "retain_grad", self._watched, undo, Hooking.LOSS_SCALING)

    def _watched(self, original: Any) -> Any:
        kept = self._kept

        @functools.wraps(original)
        def retain_grad(tensor: Tensor) -> None:
            original(tensor)
            if not tensor.is_leaf and not torch.compiler.is_compiling():
                key = id(tensor)
                kept[key] = weakref.ref(tensor, lambda _: kept.pop(key, None))

        return retain_grad

    def reach(self, outputs: Sequence[Any], known: Container[int], *, leaves: bool = True) -> None:
        """Find the tensors that a pass from `outputs` leaves gradients on.

        Args:
            outputs: Where it begins.
            known: Ids of the tensors to leave out: those of optimizers and modules.
            leaves: Whether leaves get a gradient.
        """
        nodes, variables = graph_behind(outputs)
        kept = [ref() for ref in self._kept.values()]
        found: list[Tensor] = [t for t in kept if t is not None and made_by(t) in nodes]
        if leaves:
            found += variables
            found += [t for t in outputs if isinstance(t, Tensor) and t.is_leaf]
        for tensor in found:
            key = id(tensor)
            met = self._reached.get(key)
            if key not in known and (met is None or met() is not tensor):
                self._add(key, tensor)

    def _add(self, key: int, tensor: Tensor) -> None:
        if tensor.is_complex():
            refuse(complex_refused())
        self._reached[key] = weakref.ref(tensor)
        if tensor.grad is not None:
            self._aside.append((tensor, tensor.grad))
            tensor.grad = None

    def present(self) -> list[Tensor]:
        """Return the tensors that were found and still exist."""
        return [tensor for ref in self._reached.values() if (tensor := ref()) is not None]

    def finish(self, *, drop: bool = False) -> None:
        """Add the gradients that were set aside to those that the pass has left.

        Args:
            drop: Drop what the pass has left, because it will be made again.
        """
        if drop:
            for tensor in self.present():
                tensor.grad = None
        for tensor, earlier in self._aside:
            now = tensor.grad
            if now is None:
                tensor.grad = earlier
            elif tensor.is_leaf and not (now.requires_grad or earlier.requires_grad):
                tensor.grad = earlier.add_(now)  # in place, as torch does
            else:
                tensor.grad = earlier + now
        self._aside = []
        self._reached = {}
