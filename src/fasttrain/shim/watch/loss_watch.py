"""Sees the losses that the script calls ``backward()`` on, line by line, for the guard.

A loss can be inf or nan while its gradients are finite, as behind a clamp. It counts once an
optimizer makes a step, and of several passes before that the last one at a line: whether a script
has dropped what came of the others can't be seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.hooks.backward import on_backward
from fasttrain.shim.process.callsite import call_site

# Keeps the last numbers of a row where they are, and tells whether some were inf or nan.
#
# Those of a GPU stay on it until a copy that nobody waits for has arrived. Those of the host are
# Python's: there is nothing to wait for, and each operation on a tensor takes microseconds.


IN_A_ROW = 3  # so that it is no outlier of which the script recovers
SLOTS = 64
# Beneath what levers put into Tensor: a number that the guard reads is not one that a script reads.
_Torchs: Any = Tensor.__mro__[1]


class FiniteRing:
    """The last `SLOTS` numbers of a row, read from time to time.

    Attributes:
        since: Which number was the first of those in a row that are not finite, counted from 1.
    """

    def __init__(self) -> None:
        self.since = 0
        self._count = self._judged = self._in_a_row = 0
        self._numbers = [0.0] * SLOTS  # of the host
        self._values: Tensor | None = None  # of another device
        self._slots: list[Tensor] = []
        self._copy: tuple[Tensor, Any, int] | None = None  # host, event, count

    def take(self, tensor: Tensor) -> bool:
        """Note and keep the sum of a tensor, and say whether the ring is full."""
        return self.note(tensor) and self.keep()

    def note(self, tensor: Tensor) -> bool:
        """Note the sum of a tensor, in the place of one that was not kept; whether it has one.

        Args:
            tensor: Of floating-point numbers; one that has none, such as a FakeTensor, is left out.
        """
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return False
        if tensor.is_cpu:
            self._values = None
            total = tensor if tensor.dim() == 0 else tensor.sum(dtype=torch.float32)
            self._numbers[self._count % SLOTS] = _Torchs.item(total)
        elif not _can_be_written(tensor):
            return False
        else:
            slot = self._slot(tensor.device)
            torch.sum(tensor.detach().reshape(-1), 0, dtype=torch.float32, out=slot)
        return True

    def keep(self) -> bool:
        """Have what was noted last count, and say whether the ring is full."""
        self._count += 1
        return self._count % SLOTS == 0

    def read(self) -> bool:
        """Judge the numbers that have arrived; whether `IN_A_ROW` of them were not finite."""
        if self._values is None:
            return self._judge(self._numbers, self._count)
        if not self._values.is_cuda:
            return self._judge(_Torchs.tolist(self._values), self._count)
        result = False
        if self._copy is not None:
            host, arrived, count = self._copy
            if not arrived.query():
                return False
            result = self._judge(_Torchs.tolist(host), count)
        host = torch.empty(SLOTS, dtype=torch.float32, pin_memory=True)
        host.copy_(self._values, non_blocking=True)
        torchs: Any = torch.cuda
        arrived = torchs.Event()
        arrived.record()
        self._copy = (host, arrived, self._count)
        return result

    def _slot(self, device: torch.device) -> Tensor:
        if self._values is None or self._values.device != device:
            self._values = torch.zeros(SLOTS, device=device)
            self._slots = list(self._values.unbind())
        return self._slots[self._count % SLOTS]

    def _judge(self, values: list[float], count: int) -> bool:
        first = max(self._judged, count - SLOTS)
        if first > self._judged:
            self._in_a_row = 0  # some were overwritten before they could be read
        self._judged = count
        most = 0
        for number in range(first, count):
            finite = math.isfinite(values[number % SLOTS])
            self._in_a_row = 0 if finite else self._in_a_row + 1
            if self._in_a_row == 1 and most < IN_A_ROW:
                self.since = number + 1
            most = max(most, self._in_a_row)
        return most >= IN_A_ROW


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor that may be sharded."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _can_be_written(tensor: Tensor) -> bool:
    """True if a tensor's device takes one more kernel now, as it doesn't while a graph records."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


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
