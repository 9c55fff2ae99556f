"""Sees the losses that the script calls ``backward()`` on, line by line, for the guard.

A loss can be inf or nan while its gradients are finite, as behind a clamp. It counts once an
optimizer makes a step, and of several passes before that the last one at a line: whether a script
has dropped what came of the others can't be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import CodeType

import torch
from torch import Tensor

from fasttrain.shim.hooks.backward import on_backward
from fasttrain.shim.process.callsite import call_site
from fasttrain.shim.watch.finite_ring import FiniteRing, local


class LossWatch:
    """A ring for each place in the script that makes a backward pass."""

    def __init__(self) -> None:
        self._rings: dict[tuple[CodeType, int], tuple[str, FiniteRing]] = {}
        self._noted: set[FiniteRing] = set()

    def install(self, undo: ExitStack) -> None:
        """Look at each scalar tensor whose ``backward`` is called."""
        on_backward(self._see, undo)

    def begin_anew(self) -> None:
        """Forget all, in a process that takes over from its parent."""
        self._rings.clear()
        self._noted.clear()

    def step(self) -> None:
        """Have the losses count that the script went backward from since the last step."""
        for ring in self._noted:
            ring.keep()
        self._noted.clear()

    def read(self) -> Iterator[str]:
        """Return in words which losses are inf or NaN, and since when."""
        for where, ring in self._rings.values():
            if ring.read():
                yield f"the loss at {where} is inf or NaN since step {ring.since}"

    def _see(self, loss: Tensor, code: CodeType, instruction: int) -> None:
        if loss.numel() != 1 or not loss.is_floating_point():
            return
        if loss.layout is not torch.strided or loss.is_meta:
            return
        # One of several losses may be nan while the others are not.
        seen = self._rings.get((code, instruction))
        if seen is None:
            seen = self._rings[code, instruction] = (call_site(), FiniteRing())
        ring = seen[1]
        if ring.note(local(loss)):
            self._noted.add(ring)
