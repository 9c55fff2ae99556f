"""Notices gradients and losses that are inf or NaN, without waiting for the device.

Behind each step one small gradient of its optimizer is added up into a slot of a ring on its
device: one kernel. The ring is read every few steps, on a GPU by a copy that nobody waits for. One
gradient stands for all: the first in the model is the last of the backward pass, which any inf or
nan on the way has reached, and once weights are nan every gradient is. A script that
leaves such steps out itself, as GradScaler does, makes none and is not warned of any.
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

# Names a parameter as the script's model does, for messages.


def parameter_name(parameter: Tensor) -> str:
    """Return ``Model: layers.0.weight``, or the shape of a parameter that is in no module.

    It looks at every object there is, which takes a while.
    """
    best: tuple[int, str] = (0, f"a parameter of shape {tuple(parameter.shape)}")
    for holder in gc.get_objects():
        # Not isinstance: that would ask lazily loaded objects for their class.
        if not issubclass(type(holder), Module) or "_parameters" not in vars(holder):
            continue
        named = dict(Module.named_parameters(holder))
        names = [name for name, found in named.items() if found is parameter]
        if names and len(named) > best[0]:
            best = (len(named), f"{type(holder).__name__}: {names[0]}")
    return best[1]


SMALL = 4096  # elements, which a kernel adds up in no more time than one


class NanGuard:
    """Looks at every optimizer's gradients, and at the losses.

    Args:
        choice: What is done when they are inf or NaN.
        excused: Whether they may be so for a while, as long as a loss scale still comes down.

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
        """Look behind every optimizer step, and at every loss."""
        if self._choice != "off":
            self._losses.install(undo)
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def read(self) -> None:
        """Judge what is known by now; called from time to time, behind a step.

        Raises:
            SystemExit: ``not-finite`` when the run is to stop at such numbers.
        """
        for optimizer, gradients in list(self._gradients.items()):
            if gradients.ring.read() and not self._excused():
                self._found(optimizer, gradients.ring.since)
        for told in self._losses.read():
            if not self._excused():
                self._tell(told, _bad_loss(told))

    def begin_anew(self) -> None:
        """Forget all, in a process that takes over from its parent."""
        self._gradients.clear()
        self._losses.begin_anew()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.warnings or torch.compiler.is_compiling():
            return  # what was found stays so
        self._losses.step()
        gradients = self._gradients.get(optimizer)
        if gradients is None:
            gradients = self._gradients[optimizer] = _Gradients()
        if gradients.take(optimizer):
            self.read()

    def _found(self, optimizer: Optimizer, step: int) -> None:
        bad = [p for p in _parameters(optimizer) if not _is_finite(p)]
        at = parameter_name(bad[0]) if bad else "a gradient that the script has taken away since"
        what = f"gradients of {type(optimizer).__name__} are inf or NaN since step {step}"
        told = f"{what}: first {at}, {len(bad)} in all"
        self._tell(told, _bad_gradients(what, at, len(bad)))

    def _tell(self, told: str, error: FasttrainError) -> None:
        if self.warnings:
            return  # what comes first is the cause
        self.warnings.append(told)
        if self._choice == "stop":
            refuse(error)
        told = f"fasttrain: warning: {told} (--on-nan stop would end the run)"
        print(told, file=sys.stderr, flush=True)  # noqa: T201 - a worker has no other way


class _Gradients:
    """Sums of one gradient of an optimizer, of its last steps."""

    def __init__(self) -> None:
        self.ring = FiniteRing()
        self._probe: Tensor | None = None

    def take(self, optimizer: Optimizer) -> bool:
        """Add up the gradient, and say whether the ring is full."""
        probe = self._probe
        if probe is None or probe.grad is None:
            probe = self._probe = _small(optimizer)
            if probe is None or probe.grad is None:
                return False
        return self.ring.take(local(probe.grad))


def _small(optimizer: Optimizer) -> Tensor | None:
    """Return the parameter whose gradient stands for all."""
    usable = [p for p in _parameters(optimizer) if _can_be_added_up(p)]
    small = (p for p in usable if local(p).numel() <= SMALL)
    return next(small, min(usable, key=lambda p: local(p).numel(), default=None))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _can_be_added_up(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return gradient.is_floating_point() and local(gradient).numel() > 0


def _is_finite(parameter: Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or not _can_be_added_up(parameter):
        return True
    return bool(local(gradient).isfinite().all())


def _bad_gradients(what: str, at: str, count: int) -> FasttrainError:
    return FasttrainError(
        what,
        why=f"{count} gradients are inf or NaN, the first that of {at}",
        fix="lower the learning rate, clip the gradients, look at the data of that step, or use"
        " torch.autograd.set_detect_anomaly(True); --on-nan warn goes on",
        slug="not-finite",
        exit_code=ExitCode.NOT_FINITE,
    )


def _bad_loss(what: str) -> FasttrainError:
    return FasttrainError(
        what,
        why=f"it was inf or NaN at {IN_A_ROW} steps in a row",
        fix="look at the data of that step, and at what divides, takes a root or a logarithm;"
        " --on-nan warn goes on",
        slug="not-finite",
        exit_code=ExitCode.NOT_FINITE,
    )
