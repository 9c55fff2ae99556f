"""Notices gradients that are no numbers any more, without waiting for the device.

Behind each step one small gradient of its optimizer is added up into a slot of a ring on its
device: one kernel. The ring is read every few steps, on a GPU by a copy that nobody waits for. One
gradient stands for all: the first in the model is the last of the backward pass, which any inf or
nan on the way has reached, and once weights are nan every gradient is. A script that
leaves such steps out itself, as GradScaler does, makes none and is not warned of any.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasttrain.shim.parameter_names import parameter_name
from fasttrain.shim.refusal import refuse
from fasttrain.spec.errors import ExitCode, FasttrainError
from fasttrain.spec.settings import NanChoice

IN_A_ROW = 3  # so that it is no outlier of which the script recovers
SLOTS = 64
SMALL = 4096  # elements, which a kernel adds up in no more time than one


class NanGuard:
    """Looks at every optimizer's gradients.

    Args:
        choice: What is done when they are no numbers.
        excused: Whether they may be so for a while, as long as a loss scale still comes down.

    Attributes:
        warnings: What was found.
    """

    def __init__(self, choice: NanChoice, excused: Callable[[], bool]) -> None:
        self.warnings: list[str] = []
        self._choice = choice
        self._excused = excused
        self._rings: weakref.WeakKeyDictionary[Optimizer, _Ring] = weakref.WeakKeyDictionary()

    def install(self, undo: ExitStack) -> None:
        """Look behind every optimizer step."""
        if self._choice != "off":
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def read(self) -> None:
        """Judge what is known by now; called from time to time, behind a step.

        Raises:
            SystemExit: ``not-finite`` when the run is to stop at such gradients.
        """
        for optimizer, ring in list(self._rings.items()):
            if ring.read() and not self._excused():
                self._found(optimizer, ring.since)

    def begin_anew(self) -> None:
        """Forget all, in a process that takes over from its parent."""
        self._rings.clear()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.warnings or torch.compiler.is_compiling():
            return  # what was found stays so
        ring = self._rings.get(optimizer)
        if ring is None:
            ring = self._rings[optimizer] = _Ring()
        if ring.take(optimizer):
            self.read()

    def _found(self, optimizer: Optimizer, step: int) -> None:
        if self.warnings:
            return
        bad = [p for p in _parameters(optimizer) if not _is_finite(p)]
        at = parameter_name(bad[0]) if bad else "a gradient that the script has taken away since"
        what = f"gradients of {type(optimizer).__name__} are not finite since step {step}"
        self.warnings.append(f"{what}: first {at}, {len(bad)} in all")
        if self._choice == "stop":
            refuse(_not_finite(what, at, len(bad)))
        told = f"fasttrain: warning: {self.warnings[0]} (--on-nan stop would end the run)"
        print(told, file=sys.stderr, flush=True)  # noqa: T201 - a worker has no other way


class _Ring:
    """Sums of one gradient of an optimizer, of its last `SLOTS` steps.

    Attributes:
        since: The first of those steps in a row whose sums are not finite.
    """

    def __init__(self) -> None:
        self.since = 0
        self._steps = self._judged = self._in_a_row = 0
        self._probe: Tensor | None = None
        self._values = torch.empty(0)
        self._slots: list[Tensor] = []
        self._copy: tuple[Tensor, Any, int] | None = None  # host, event, steps

    def take(self, optimizer: Optimizer) -> bool:
        """Add up the gradient, and say whether the ring is full."""
        probe = self._probe
        if probe is None or probe.grad is None:
            probe = self._choose(optimizer)
            if probe is None or probe.grad is None:
                return False
        gradient = _local(probe.grad)
        if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        slot = self._slots[self._steps % SLOTS]
        torch.sum(gradient.reshape(-1), 0, dtype=torch.float32, out=slot)
        self._steps += 1
        return self._steps % SLOTS == 0

    def _choose(self, optimizer: Optimizer) -> Tensor | None:
        usable = [p for p in _parameters(optimizer) if _can_be_added_up(p)]
        small = (p for p in usable if _local(p).numel() <= SMALL)
        smallest = min(usable, key=lambda p: _local(p).numel(), default=None)
        probe = self._probe = next(small, smallest)
        if probe is not None and (not self._slots or self._values.device != probe.device):
            self._values = torch.zeros(SLOTS, device=probe.device)
            self._slots = list(self._values.unbind())
        return probe

    def read(self) -> bool:
        """Judge the sums that have arrived; whether `IN_A_ROW` of them were not finite."""
        if not self._values.is_cuda:
            return self._judge(self._values.tolist(), self._steps)
        result = False
        if self._copy is not None:
            host, arrived, steps = self._copy
            if not arrived.query():
                return False
            result = self._judge(host.tolist(), steps)
        host = torch.empty(SLOTS, dtype=torch.float32, pin_memory=True)
        host.copy_(self._values, non_blocking=True)
        torchs: Any = torch.cuda
        arrived = torchs.Event()
        arrived.record()
        self._copy = (host, arrived, self._steps)
        return result

    def _judge(self, values: list[float], steps: int) -> bool:
        first = max(self._judged, steps - SLOTS)
        if first > self._judged:
            self._in_a_row = 0  # some were overwritten before they could be read
        self._judged = steps
        most = 0
        for number in range(first, steps):
            finite = math.isfinite(values[number % SLOTS])
            self._in_a_row = 0 if finite else self._in_a_row + 1
            if self._in_a_row == 1 and most < IN_A_ROW:
                self.since = number + 1
            most = max(most, self._in_a_row)
        return most >= IN_A_ROW


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    """Give the part of a sharded tensor that this rank has."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.detach()


def _can_be_added_up(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return gradient.is_floating_point() and _local(gradient).numel() > 0


def _is_finite(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or not _can_be_added_up(parameter):
        return True
    return bool(_local(gradient).isfinite().all())


def _not_finite(what: str, at: str, count: int) -> FasttrainError:
    return FasttrainError(
        what,
        why=f"{count} gradients are inf or nan, the first that of {at}",
        fix="lower the learning rate, clip the gradients, look at the data of that step, or use"
        " torch.autograd.set_detect_anomaly(True); --on-nan warn goes on",
        slug="not-finite",
        exit_code=ExitCode.NOT_FINITE,
    )
