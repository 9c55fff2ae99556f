"""Counts and times training steps, for the events and the receipt."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.model.outcome import StepStats
from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.backward import on_backward
from fasttrain.shim.hooks.loaders import on_batch
from fasttrain.shim.hooks.seams import then
from fasttrain.shim.hooks.throughput import Throughput

KEPT_INTERVALS = 10_000  # enough for a p95, and bounded however long the run
_MADE = "_patch_step_function"  # called by Optimizer's constructor, from torch 2.0 on


class StepMeter:
    """Counts steps: iterations of the training loop, in which each optimizer steps once.

    The next iteration begins when an optimizer steps for the second time, or when one steps that
    was created during this iteration, such as that of the next cross-validation fold. So the two
    optimizers of a GAN make one step together. If the script has no optimizer, each backward pass
    is a step.

    Attributes:
        steps: Steps so far; never decreases.
        device: Where the first parameter of the first optimizer is, such as ``cuda:0``; empty
            before its first step.
        throughput: Counts samples and tokens; the runtime reports model calls to it.
        on_step: Called after each step with its number.
        before_next: Called before an optimizer begins the next step, with the number of steps.
        on_pass: If each backward pass is a step, called before each one with the number of those
            before it.
    """

    def __init__(self, started_s: float) -> None:
        self.throughput = Throughput()
        self.on_step: list[Callable[[int], None]] = []
        self.before_next: list[Callable[[int], None]] = []
        self.on_pass: list[Callable[[int], None]] = []
        self._clear(started_s)

    def reset(self) -> None:
        """Count from zero, in a forked child."""
        self._clear(time.perf_counter())

    def _clear(self, started_s: float) -> None:
        self.steps = 0
        self.device = ""
        self._started_s = started_s
        self._first_step_s = 0.0
        self._last_s = 0.0
        self._intervals_s: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._stepped: set[int] = set()  # ids of the optimizers that stepped in this iteration
        # The number of steps when each optimizer was created
        self._made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._by_passes = True
        self.throughput.clear()

    def reset_times(self) -> None:
        """Forget the times so far; the steps still count."""
        self._intervals_s.clear()
        self._last_s = time.perf_counter()
        self.throughput.clear()
        self.throughput.step(self._last_s)

    def install(self, undo: ExitStack) -> None:
        """Hook the construction and the steps of optimizers, backward passes, and batches."""
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        on_backward(self._before_pass, undo)
        on_batch(self.throughput.handed_out, undo)
        if not hasattr(Optimizer, _MADE):
            return  # an optimizer's first step is then in the iteration of another's last one
        # Not around __init__: what raises there would have a frame of ours in its traceback.
        patching.wrap(Optimizer, _MADE, then(self._note_made, even_traced=True), undo)

    def _note_made(self, optimizer: Optimizer) -> None:
        self._by_passes = False
        self._made[optimizer] = self.steps

    @property
    def several(self) -> bool:
        """True if an iteration may have more than one optimizer."""
        return len(self._made) > 1

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.steps and not torch.compiler.is_compiling() and self._begins_step(optimizer):
            for listen in self.before_next:
                listen(self.steps)
        self.throughput.in_step = True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # dynamo traces a compiled step once; its later runs don't come here
        self._by_passes = False
        self.throughput.optimizer_step()
        if not self._begins_step(optimizer):
            self._stepped.add(id(optimizer))
            return
        self._stepped = {id(optimizer)}
        if not self.device:
            held = (p for group in optimizer.param_groups for p in group["params"])
            self.device = next((str(p.device) for p in held), "")
        self._count()
        for listen in self.on_step:
            listen(self.steps)

    def _begins_step(self, optimizer: Optimizer) -> bool:
        # A new optimizer may have the id of one that is gone: it counts by its creation.
        return (
            not self._stepped
            or id(optimizer) in self._stepped
            or self._made.get(optimizer, 0) >= self.steps
        )

    def _before_pass(self, *_: Any) -> None:
        if not self._by_passes:
            self.throughput.backward()
            return
        self.throughput.optimizer_step()
        if self.steps:
            for listen in self.on_pass:
                listen(self.steps)
        self._count()

    def _count(self) -> None:
        now = time.perf_counter()
        if self.steps:
            self._intervals_s.append(now - self._last_s)
        else:
            self._first_step_s = now - self._started_s
        self.throughput.step(now)
        self.steps += 1
        self._last_s = now

    def stats(self, compile_s: float) -> StepStats:
        """Return speed and memory so far; see `StepStats` for units."""
        intervals = sorted(self._intervals_s)
        median_s = statistics.median(intervals) if intervals else 0.0
        samples_per_s, tokens_per_s = self.throughput.rates()
        return StepStats(
            steps=self.steps,
            are_passes=self._by_passes and self.steps > 0,
            median_step_s=median_s,
            p95_step_s=_p95(intervals),
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            first_step_s=self._first_step_s,
            compile_s=compile_s,
            peak_memory_bytes=peak_memory_bytes(),
            wall_s=time.perf_counter() - self._started_s,
        )

    def recent_step_s(self) -> float:
        """Return the time of the last step, in seconds; 0 before the second one."""
        return self._intervals_s[-1] if self._intervals_s else 0.0


def _p95(ascending: Sequence[float]) -> float:
    """Return the 95th percentile (nearest rank), never below the median; 0 without values."""
    return ascending[math.ceil(0.95 * len(ascending)) - 1] if ascending else 0.0


def _in_use(module: Any) -> bool:
    return bool(module.is_initialized() and module.is_available())


def peak_memory_bytes() -> int:
    """Return the peak of the accelerator's allocator, or of resident memory on a CPU."""
    for name in LIKE_CUDA:
        module: Any = getattr(torch, name, None)  # torch.npu is there once torch_npu is
        if hasattr(module, "max_memory_allocated") and _in_use(module):
            return int(module.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
