"""Finds gradients and losses that are inf or NaN, without waiting for the device.

After each step one small gradient of its optimizer is summed into a slot of a ring on its device:
one kernel. The ring is read every few steps, on a GPU by an asynchronous copy. One gradient is
enough: that of the model's first parameter comes last in the backward pass, so that any inf or NaN
on the way has reached it, and once weights are NaN every gradient is. A script that skips such
steps itself, as GradScaler does, makes no step then, and is not warned.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.settings import NanChoice
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.watch.loss_watch import IN_A_ROW, FiniteRing, LossWatch, local


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
