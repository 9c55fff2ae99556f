"""Watches the losses that the script calls ``backward()`` on, for the NaN guard.

A loss can be inf or NaN while its gradients are finite, as after a clamp. Each line of the script
that makes a backward pass is watched for itself. Its loss counts when an optimizer steps; of
several backward passes before that step only the last one of a line counts, because the script may
have dropped the gradients of the others.
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

IN_A_ROW = 3  # a single one may be an outlier that the script recovers from
SLOTS = 64
# Tensor's base class has torch's own item() and tolist(). Those of Tensor may be a lever's, which
# takes each call for a read by the script.
_Torchs: Any = Tensor.__mro__[1]


class FiniteRing:
    """Keeps the last `SLOTS` numbers of a sequence, and finds out later whether they are finite.

    Numbers on a GPU stay there, and are read by an asynchronous copy, so that no step waits for the
    device. Numbers on the CPU are kept as Python floats: there is nothing to wait for, and an
    operation on a tensor takes microseconds.

    Attributes:
        since: The number, counted from 1, at which the present row of inf and NaN began.
    """

    def __init__(self) -> None:
        self.since = 0
        self._count = self._judged = self._in_a_row = 0
        self._numbers = [0.0] * SLOTS  # numbers on the CPU
        self._values: Tensor | None = None  # numbers on another device
        self._slots: list[Tensor] = []
        self._copy: tuple[Tensor, Any, int] | None = None  # host, event, count

    def take(self, tensor: Tensor) -> bool:
        """Note and keep the sum of a tensor; return whether the ring is full."""
        return self.note(tensor) and self.keep()

    def note(self, tensor: Tensor) -> bool:
        """Note the sum of a tensor; it replaces the one noted before, unless that was kept.

        Args:
            tensor: Of floating-point numbers.

        Returns:
            False if the tensor has no numbers that can be read now, such as a FakeTensor.
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
        """Keep the sum that was noted last; return whether the ring is full."""
        self._count += 1
        return self._count % SLOTS == 0

    def read(self) -> bool:
        """Return whether `IN_A_ROW` numbers were not finite, by those that have arrived so far."""
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
    """Return this rank's part of a tensor, which may be a DTensor."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _can_be_written(tensor: Tensor) -> bool:
    """True if a kernel may run on the tensor's device now: no CUDA graph is being captured."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class LossWatch:
    """Keeps the losses of each place in the script that makes a backward pass."""

    def __init__(self) -> None:
        self._rings: dict[tuple[CodeType, int], tuple[str, FiniteRing]] = {}
        self._noted: set[FiniteRing] = set()

    def install(self, undo: ExitStack) -> None:
        """Watch each scalar tensor whose ``backward`` is called."""
        on_backward(self._see, undo)

    def reset(self) -> None:
        """Forget all losses, in a forked child."""
        self._rings.clear()
        self._noted.clear()

    def step(self) -> None:
        """Keep the losses of the backward passes since the last step."""
        for ring in self._noted:
            ring.keep()
        self._noted.clear()

    def read(self) -> Iterator[str]:
        """Yield a sentence for each place whose losses are inf or NaN, with the step it began."""
        for where, ring in self._rings.values():
            if ring.read():
                yield f"the loss at {where} is inf or NaN since step {ring.since}"

    def _see(self, loss: Tensor, code: CodeType, instruction: int) -> None:
        if loss.numel() != 1 or not loss.is_floating_point():
            return
        if loss.layout is not torch.strided or loss.is_meta:
            return
        # Per instruction, because one of several losses may be NaN while the others are not.
        seen = self._rings.get((code, instruction))
        if seen is None:
            seen = self._rings[code, instruction] = (call_site(), FiniteRing())
        ring = seen[1]
        if ring.note(local(loss)):
            self._noted.add(ring)
