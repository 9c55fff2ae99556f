"""Finds gradients and losses that are inf or NaN, without waiting for the device.

After each step one small gradient of its optimizer is summed into a slot of a ring on its device:
one kernel. The ring is read every few steps, from a device by an asynchronous copy. One gradient is
enough: that of the model's first parameter comes last in the backward pass, so that any inf or NaN
on the way has reached it, and once weights are NaN every gradient is. A script that skips such
steps itself, as GradScaler does, makes no step then, and is not warned.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.settings import NanChoice
from fasttrain.shim.hooks.device_clock import TORCHS, HostCopy, is_capturing, module_of
from fasttrain.shim.hooks.loop import on_backward
from fasttrain.shim.process.callsite import call_site
from fasttrain.shim.process.refusal import refuse

# Watches the losses that the script calls ``backward()`` on, for the NaN guard.
#
# A loss can be inf or NaN while its gradients are finite, as after a clamp. Each line of the
# script that makes a backward pass is watched for itself. Its loss counts when an optimizer
# steps; of several backward passes before that step only the last one of a line counts, because
# the script may have dropped the gradients of the others.


IN_A_ROW = 3  # a single one may be an outlier that the script recovers from
SLOTS = 64


class FiniteRing:
    """Keeps the last `SLOTS` numbers of a sequence, and finds out later whether they are finite.

    Numbers on a device stay there, and are read by an asynchronous copy, so that no step waits for
    it. Numbers on the CPU are kept as Python floats: there is nothing to wait for, and an
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
        self._copying: tuple[HostCopy, int] | None = None  # the last one, and its count

    def take(self, tensor: Tensor) -> bool:
        """Note and keep the sum of a tensor; return whether the ring is full."""
        return self.note(tensor) and self.keep()

    def note(self, tensor: Tensor) -> bool:
        """Note the sum of a tensor; it replaces the one noted before, unless that was kept.

        Args:
            tensor: Of floating-point numbers.

        Returns:
            False if it has no numbers that can be read now, as a FakeTensor, one on meta, or in a
            dispatch mode.
        """
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return False
        if torch._C._len_torch_dispatch_stack():
            return False  # a mode of the script's would see the sum
        if tensor.is_cpu:
            self._values = None
            total = tensor if tensor.dim() == 0 else tensor.sum(dtype=torch.float32)
            self._numbers[self._count % SLOTS] = TORCHS.item(total)
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
        if module_of(self._values.device) is None:
            return self._judge(TORCHS.tolist(self._values), self._count)
        if is_capturing(self._values.device):
            return False  # a copy would be a part of the graph
        result = False
        if self._copying is not None:
            copied, count = self._copying
            if not copied.has_arrived():
                return False
            result = self._judge(copied.tolist(), count)
        self._begin_copy(self._values)
        return result

    def _begin_copy(self, values: Tensor) -> None:
        self._copying = HostCopy(values), self._count

    def _slot(self, device: torch.device) -> Tensor:
        if self._values is None or self._values.device != device:
            self._values = torch.zeros(SLOTS, dtype=torch.float32, device=device)
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
    """True if a kernel can run on the tensor's device now: it has memory, and captures no graph."""
    return not tensor.is_meta and not is_capturing(tensor.device)


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
        noted, self._noted = self._noted, set()  # another thread may be in a backward pass
        for ring in list(noted):
            ring.keep()

    def read(self) -> Iterator[str]:
        """Yield a sentence for each place whose losses are inf or NaN, with the step it began."""
        for where, ring in list(self._rings.values()):
            if ring.read():
                yield f"the loss at {where} is inf or NaN since step {ring.since}"

    def _see(self, loss: Tensor, code: CodeType, instruction: int) -> None:
        with torch._C.DisableTorchFunction():  # the script's would see what is asked for
            self._note(loss, code, instruction)

    def _note(self, loss: Tensor, code: CodeType, instruction: int) -> None:
        if loss.numel() != 1 or not loss.is_floating_point():
            return
        if loss.layout is not torch.strided:
            return
        # Per instruction, because one of several losses may be NaN while the others are not.
        seen = self._rings.get((code, instruction))
        if seen is None:
            seen = self._rings[code, instruction] = (call_site(), FiniteRing())
        ring = seen[1]
        if ring.note(local(loss)):
            self._noted.add(ring)


# Finds gradients and losses that are inf or NaN, without waiting for the device.


def parameter_name(parameter: Tensor) -> str:
    """Return a parameter's name such as ``Model: layers.0.weight``; its shape if no module has it.

    Slow: searches all objects of the process.
    """
    best: tuple[int, str] = (0, f"a parameter of shape {tuple(parameter.shape)}")
    for holder in gc.get_objects():
        # Not isinstance: it reads __class__, which makes lazy objects load themselves.
        if not issubclass(type(holder), Module) or "_parameters" not in vars(holder):
            continue
        named = dict(Module.named_parameters(holder))
        names = [name for name, found in named.items() if found is parameter]
        if names and len(named) > best[0]:
            best = (len(named), f"{type(holder).__name__}: {names[0]}")
    return best[1]


SMALL = 4096  # elements: summing so many takes a kernel no longer than one


class NanGuard:
    """Watches the gradients of every optimizer, and the losses.

    Args:
        choice: What is done when they are inf or NaN.
        excused: True while they may be, because the loss scale still backs off.

    Attributes:
        warnings: What was found.
    """

    def __init__(self, choice: NanChoice, excused: Callable[[], bool]) -> None:
        self.warnings: list[str] = []
        self._choice = choice
        self._excused = excused
        self._losses = LossWatch()
        self._gradients: weakref.WeakKeyDictionary[Optimizer, _Gradients]
        self._gradients = weakref.WeakKeyDictionary()

    def install(self, undo: ExitStack) -> None:
        """Watch every optimizer step and every loss, unless the guard is off."""
        if self._choice != "off":
            self._losses.install(undo)
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def read(self) -> None:
        """Judge the numbers that have arrived; called from time to time, after a step.

        Raises:
            SystemExit: ``not-finite`` if some are inf or NaN and the run stops at that.
        """
        for optimizer, gradients in list(self._gradients.items()):
            if gradients.ring.read() and not self._excused():
                self._found(optimizer, gradients.ring.since)
        for finding in self._losses.read():
            if not self._excused():
                self._report(finding, _bad_loss(finding))

    def reset(self) -> None:
        """Forget all numbers, in a forked child."""
        self._gradients.clear()
        self._losses.reset()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.warnings or torch.compiler.is_compiling():
            return  # one finding is enough
        with torch._C.DisableTorchFunction():  # the script's would see what is asked for
            self._take(optimizer)

    def _take(self, optimizer: Optimizer) -> None:
        self._losses.step()
        gradients = self._gradients.get(optimizer)
        if gradients is None:
            gradients = self._gradients[optimizer] = _Gradients()
        if gradients.take(optimizer):
            self.read()

    def _found(self, optimizer: Optimizer, step: int) -> None:
        bad = [p for p in _parameters(optimizer) if not _is_finite(p)]
        at = parameter_name(bad[0]) if bad else "a gradient that the script has cleared since"
        what = f"gradients of {type(optimizer).__name__} are inf or NaN since step {step}"
        finding = f"{what}: first {at}, {len(bad)} in all"
        self._report(finding, _bad_gradients(what, at, len(bad)))

    def _report(self, finding: str, error: FasttrainError) -> None:
        if self.warnings:
            return  # the first finding is the cause of later ones
        self.warnings.append(finding)
        if self._choice == "stop":
            refuse(error)
        warning = f"fasttrain: warning: {finding} (--on-nan stop would end the run)"
        print(warning, file=sys.stderr, flush=True)  # noqa: T201 - a worker has no other channel


class _Gradients:
    """Keeps the sums of one gradient of an optimizer, for its last steps."""

    def __init__(self) -> None:
        self.ring = FiniteRing()
        self._probe: Tensor | None = None

    def take(self, optimizer: Optimizer) -> bool:
        """Sum the gradient into the ring; return whether the ring is full."""
        probe = self._probe
        if probe is None or probe.grad is None:
            probe = self._probe = _small(optimizer)
            if probe is None or probe.grad is None:
                return False
        return self.ring.take(local(probe.grad))


def _small(optimizer: Optimizer) -> Tensor | None:
    """Return the parameter whose gradient is watched for all; None if none is usable.

    The first small one, or the smallest.
    """
    usable = [p for p in _parameters(optimizer) if _can_be_summed(p)]
    small = (p for p in usable if local(p).numel() <= SMALL)
    return next(small, min(usable, key=lambda p: local(p).numel(), default=None))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _can_be_summed(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return gradient.is_floating_point() and local(gradient).numel() > 0


def _is_finite(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or not _can_be_summed(parameter):
        return True
    return bool(local(gradient).isfinite().all())


def _bad_gradients(what: str, at: str, count: int) -> FasttrainError:
    return FasttrainError(
        what,
        why=f"{count} gradients are inf or NaN, the first that of {at}",
        fix="lower the learning rate, clip the gradients, check the data of that step, or use"
        " torch.autograd.set_detect_anomaly(True); --on-nan warn lets the run go on",
        slug="not-finite",
        exit_code=ExitCode.NOT_FINITE,
    )


def _bad_loss(what: str) -> FasttrainError:
    return FasttrainError(
        what,
        why=f"it was inf or NaN at {IN_A_ROW} steps in a row",
        fix="check the data of that step, and where the model divides or takes a root or a"
        " logarithm; --on-nan warn lets the run go on",
        slug="not-finite",
        exit_code=ExitCode.NOT_FINITE,
    )
