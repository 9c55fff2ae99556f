"""Sees the losses that the script calls ``backward()`` on, line by line, for the guard.

A loss can be inf or nan while its gradients are finite, as behind a clamp. It is seen when the
script looks ``backward`` up: what it then calls is torch's own, so that no traceback gets a frame.
It counts once an optimizer makes a step, and of several passes before that the last one at a line:
whether a script has dropped what came of the others can't be seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.callsite import call_site
from fasttrain.shim.eager import pass_over
from fasttrain.shim.finite_ring import FiniteRing, local


class LossWatch:
    """A ring for each place in the script that makes a backward pass."""

    def __init__(self) -> None:
        self._rings: dict[tuple[CodeType, int], tuple[str, FiniteRing]] = {}
        self._noted: set[FiniteRing] = set()

    def install(self, undo: ExitStack) -> None:
        """Look at each scalar tensor whose ``backward`` is called."""
        pass_over(_Backward.__get__, all_it_calls=True)
        own = _Backward(Tensor.backward, self._see)
        setattr(Tensor, "backward", own)  # noqa: B010 - mypy takes it for a method
        undo.callback(_put_back, own)

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
        """Give in words which losses are inf or nan, and since when."""
        for where, ring in self._rings.values():
            if ring.read():
                yield f"the loss at {where} is not finite since step {ring.since}"

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


class _Backward:
    """Stands for ``Tensor.backward``, and gives it to whoever asks."""

    def __init__(self, torchs: Any, see: Callable[[Tensor, CodeType, int], None]) -> None:
        self.torchs = torchs
        self._see = see

    def __get__(self, loss: Tensor | None, owner: type[Tensor]) -> Any:
        if loss is None:
            return self.torchs
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            self._see(loss, caller.f_code, caller.f_lasti)
        return self.torchs.__get__(loss, owner)


def _put_back(own: _Backward) -> None:
    if vars(Tensor)["backward"] is own:  # the script may have put its own there
        setattr(Tensor, "backward", own.torchs)  # noqa: B010
