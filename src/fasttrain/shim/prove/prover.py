"""Takes steps of the script in turns, and reports their losses and times."""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fasttrain.model.proof import Took
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.device_clock import module_of
from fasttrain.shim.hooks.gradients import ends_of
from fasttrain.shim.hooks.seams import Differentiating
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.process.turns import Turns
from fasttrain.statistics.paired import StepTime


class Losses:
    """Collects what backward passes start from, without waiting for a device.

    A step's loss is the mean of all that its backward passes start from.
    """

    def __init__(self) -> None:
        self.passes = 0
        self._of_step: list[Tensor] = []
        self._of_steps: list[list[Tensor]] = []

    def install(self, undo: ExitStack) -> None:
        """Watch ``backward()``, as a method of tensors or of ``torch.autograd``."""
        patching.wrap(torch.autograd, "backward", self._watched, undo, Differentiating.LOSSES)

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(tensors, *args, **kwargs)
            ends = ends_of(tensors)
            self.note(ends)
            return original(ends, *args, **kwargs)

        return backward

    @torch.no_grad()
    def note(self, ends: Iterable[Any]) -> None:
        """Note what a backward pass starts from, as far as it has numbers to read."""
        self.passes += 1
        for end in ends:
            if not isinstance(end, Tensor) or end.layout is not torch.strided:
                continue  # an edge of the graph has no value; sparse tensors have no mean
            if end.is_nested or end.is_meta:
                continue
            value = end.detach()
            if value.is_complex():
                value = torch.view_as_real(value.resolve_conj())
            # A copy: a CUDA graph, or the script, may write another value into it.
            self._of_step.append(value.clone() if value.numel() == 1 else value.float().mean())

    def end_step(self) -> None:
        """Count what was noted to the step that ends."""
        self._of_steps.append(self._of_step)
        self._of_step = []

    def read(self) -> tuple[float | None, ...]:
        """Return the losses of the steps since the last call; waits for a device."""
        taken, self._of_steps = self._of_steps, []
        return tuple(_mean([tensor.item() for tensor in step]) for step in taken)


def _mean(values: list[Any]) -> float | None:
    if not values:
        return None
    mean = sum(values) / len(values) if len(values) > 1 else float(values[0])
    return mean if math.isfinite(mean) else None


class Prover:
    """Takes steps while it is this worker's turn.

    Args:
        turns: Gives the turns.
        meter: Knows the device.
        beat: Shows that this process has not hung.
        draws: Returns whether this rank draws random numbers that one process doesn't draw.

    Attributes:
        losses: The losses.
        steps: Steps since the script began.
    """

    def __init__(
        self,
        turns: Turns,
        meter: StepMeter,
        beat: Callable[[], object],
        draws: Callable[[], bool] = lambda: False,
    ) -> None:
        self.losses = Losses()
        self._turns, self._meter, self._beat, self._draws = turns, meter, beat, draws
        self._began_s = 0.0
        self.steps = self._taken = 0
        self._times: list[StepTime] = []
        self._mark: StepTime | None = None  # the beginning of what is timed
        self._over = False
        self._stepping: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._threads_train = False

    def install(self, undo: ExitStack) -> None:
        """Watch the losses, and wait for the first turn."""
        self.losses.install(undo)
        self._begin_turn()

    def after_step(self) -> None:
        """Note the step; at the end of the turn, report it and wait for the next one."""
        if not self._turns.is_own:
            return
        if self._over:
            sys.exit(0)
        self.losses.end_step()
        self.steps += 1
        self._taken += 1
        self._stepping.add(threading.current_thread())
        self._threads_train |= sum(thread.is_alive() for thread in self._stepping) > 1
        self._time()
        if self._taken < self._turns.turn.steps:
            return
        self._report(ended=False)
        self._begin_turn()

    def _begin_turn(self) -> None:
        if self._turns.wait(self._beat).over:
            self._over = True
            sys.exit(0)
        self._taken = 0
        self._times = []
        self._began_s = time.perf_counter()
        self._mark = None if self._turns.turn.untimed else self._now()

    def finish(self) -> None:
        """Report that the script has ended, unless it was told to."""
        if self._turns.is_own and not self._over:
            self._over = True
            self._report(ended=True)

    def _time(self) -> None:
        turn = self._turns.turn
        ends = self._taken >= turn.steps
        if self._mark is not None and (self._each or ends):
            now, steps = self._now(), 1 if self._each else turn.steps - turn.untimed
            wall_s = (now.wall_s - self._mark.wall_s) / steps
            processor_s = (now.processor_s - self._mark.processor_s) / steps
            # On a device the processor's time says nothing.
            self._times.append(StepTime(wall_s, processor_s if self._module is None else wall_s))
        if self._taken >= turn.untimed and not ends and (self._mark is None or self._each):
            self._mark = self._now()

    @property
    def _each(self) -> bool:
        return self._turns.turn.one_by_one or self._module is None

    @property
    def _module(self) -> Any:
        return module_of(torch.device(self._meter.device or "cpu"))

    def _now(self) -> StepTime:
        module = self._module
        if module is not None:
            module.synchronize(torch.device(self._meter.device))
        return StepTime(time.perf_counter(), time.process_time())

    def _report(self, *, ended: bool) -> None:
        losses = self.losses.read()
        passes, self.losses.passes = self.losses.passes, 0
        self._turns.report(
            Took(
                steps=self.steps,
                losses=losses,
                wall_s=tuple(one.wall_s for one in self._times),
                processor_s=tuple(one.processor_s for one in self._times),
                turn_s=time.perf_counter() - self._began_s,
                ended=ended,
                passes=passes,
                threads=torch.get_num_threads(),
                draws=self._draws(),
                threads_train=self._threads_train,
            )
        )
