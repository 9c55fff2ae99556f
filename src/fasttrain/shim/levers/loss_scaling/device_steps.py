"""Steps that a device skips by itself, and their counts, which nothing waits for.

`torch.amp.GradScaler` reads on the host whether a gradient overflowed, and waits for the device to
do so, except where the optimizer's kernel takes that number itself: it sets ``found_inf`` on a
fused optimizer for the length of a step. Loss scaling does the same. How many steps were skipped
is then known to the device alone, and comes to the host by copies that are read once they have
arrived.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fasttrain.shim.hooks.device_clock import TORCHS, HostCopy, is_capturing

# Fused kernels that return at once if found_inf is 1, and whose step counters go back then.
# Source: torch/optim/*.py; FusedAdam.cpp, FusedSGD.cpp, FusedAdagrad.cpp, and those below cuda/ in
# aten/src/ATen/native; torch 2.13
TOLD = (Adam, AdamW, SGD, Adagrad)
TOLD_ON = ("cpu", "cuda")
# Longer than what a script has queued at its end, and short enough to end beside a stuck device
WAIT_S = 10.0
POLL_S = 0.001


def skips_by_itself(optimizer: Optimizer, found: Tensor) -> bool:
    """True if the optimizer's step that begins now changes nothing where its ``found_inf`` is 1.

    A subclass may do more in its step than torch's, such as averaging weights.

    Args:
        optimizer: Its groups are as the step will find them: ``fused`` or not.
        found: The scalar that it would get.
    """
    if type(optimizer) not in TOLD or found.device.type not in TOLD_ON:
        return False
    if hasattr(optimizer, "found_inf"):  # the script's own
        return False
    return all(
        group.get("fused") and _whole(group) and _begun(optimizer, group)
        for group in optimizer.param_groups
    )


def _whole(group: dict[str, Any]) -> bool:
    """True unless parameters are sharded (DTensors), with which this was never seen to be right."""
    return not any(hasattr(p, "_local_tensor") for p in group["params"])


def _begun(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """True unless this is SGD's first step with momentum.

    torch makes the buffers then without writing to them, which is left to the kernel. If that
    returns at once, the next step takes what happens to lie there for momentum.
    Source: torch/optim/sgd.py, torch 2.13, ``_fused_sgd``
    """
    if type(optimizer) is not SGD or group["momentum"] == 0:
        return True
    state = optimizer.state
    return all(
        state.get(p, {}).get("momentum_buffer") is not None
        for p in group["params"]
        if p.grad is not None
    )


@dataclass(frozen=True, slots=True)
class Counted:
    """The scale at some moment, and the steps made and skipped until then."""

    scale: float
    made: int
    skipped: int


class Tally:
    """Counts steps, of which the device alone may know whether they were skipped.

    Args:
        scale: The first scale.

    Attributes:
        made: Steps of which the host knows that they were made.
        skipped: Steps of which the host knows that they were skipped.
    """

    def __init__(self, scale: float) -> None:
        self._first_scale = scale
        self.reset()

    def reset(self) -> None:
        """Count from zero, in a forked child: its parent's steps are not its own."""
        self.made = self.skipped = 0
        self._handed = 0  # steps that were left to the device
        self._skipped_there: Tensor | None = None  # of these
        self._copy: _Copy | None = None
        self._known = Counted(self._first_scale, 0, 0)

    def add(self, found: Tensor) -> None:
        """Count a step that is skipped if ``found`` is 1."""
        self._handed += 1
        if self._skipped_there is None:
            self._skipped_there = torch.zeros_like(found)
        self._skipped_there += found

    def read(self, scale: Tensor, *, wait: bool) -> Counted:
        """Return what is known by now.

        Args:
            scale: The scale, a scalar on the device.
            wait: Whether to wait for the device, at most `WAIT_S` seconds.
        """
        if not is_behind(scale):
            self._known = self._counted().given(TORCHS.tolist(self._numbers(scale)))
            return self._known
        with suppress(RuntimeError):  # of a device that has failed, which the script is told of
            self._take()
            if wait:
                self._copy = None  # it began before the last steps
            if self._copy is None and not is_capturing(scale.device):
                self._copy = _Copy(self._numbers(scale), self._counted())
            if wait:
                self._wait()
        return self._known

    def _numbers(self, scale: Tensor) -> Tensor:
        skipped = self._skipped_there
        return torch.stack([scale, torch.zeros_like(scale) if skipped is None else skipped])

    def _counted(self) -> _Pending:
        return _Pending(self.made + self._handed, self.skipped)

    def _take(self) -> None:
        if self._copy is not None and self._copy.has_arrived():
            self._known, self._copy = self._copy.counted(), None

    def _wait(self) -> None:
        end = time.monotonic() + WAIT_S
        while self._copy is not None and time.monotonic() < end:
            self._take()
            time.sleep(POLL_S)


def is_behind(tensor: Tensor) -> bool:
    """True if reading a tensor waits for a device, and it can be copied without waiting."""
    return tensor.is_cuda


@dataclass(frozen=True, slots=True)
class _Pending:
    """Counts of a moment, until it is known how many of the steps the device has skipped."""

    made: int
    skipped: int

    def given(self, numbers: list[float]) -> Counted:
        scale, skipped = numbers[0], int(numbers[1])
        return Counted(scale, self.made - skipped, self.skipped + skipped)


class _Copy:
    """Numbers on their way to the host, and the counts of the moment at which they left."""

    def __init__(self, numbers: Tensor, counts: _Pending) -> None:
        self._counts = counts
        self._copied = HostCopy(numbers)

    def has_arrived(self) -> bool:
        return self._copied.has_arrived()

    def counted(self) -> Counted:
        return self._counts.given(self._copied.tolist())
