"""Counts optimizer steps and times them; the clock of the whole receipt."""

from __future__ import annotations

import resource
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasttrain.shim.roots import Root
from fasttrain.spec.outcome import StepStats

KEPT_INTERVALS = 10_000  # enough for a p95, and bounded however long the run


class StepMeter:
    """Follows the optimizer that steps most; a GAN's second one doesn't count twice.

    Attributes:
        steps: Steps of the leading optimizer.
        device: Where its first parameter is, such as ``cuda:0``; empty before its first step.
        on_step: Called behind each of them with their number.
    """

    def __init__(self, started_s: float) -> None:
        self.on_step: list[Callable[[int], None]] = []
        self._clear(started_s)

    def begin_anew(self) -> None:
        """Count from zero, in a process that takes over from its parent."""
        self._clear(time.perf_counter())

    def _clear(self, started_s: float) -> None:
        self.steps = 0
        self.device = ""
        self._started_s = started_s
        self._first_step_s = 0.0
        self._last_s = 0.0
        self._intervals_s: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._sampled: Root | None = None
        self._samples = 0
        self._samples_since_first = 0
        self._timed_from = 1

    def time_anew(self) -> None:
        """Forget what was timed so far; the steps still count."""
        self._intervals_s.clear()
        self._samples = self._samples_since_first = 0
        self._timed_from = self.steps
        self._last_s = time.perf_counter()

    def install(self, undo: ExitStack) -> None:
        """Hook the end of every optimizer step."""
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def count_samples(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the first dimension of a training call's first tensor.

        Only the root that is called first in a step counts: its samples pass on through the
        others, such as a decoder or a discriminator.
        """
        if not torch.is_grad_enabled() or self._sampled not in (None, root):
            return
        self._sampled = root
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim():
                self._samples += value.shape[0]
                return

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a step that the script compiles is traced once and then not seen
        count = self._counts.get(optimizer, 0) + 1
        self._counts[optimizer] = count
        if count <= self.steps:
            return  # another optimizer of the same iteration
        now = time.perf_counter()
        if self.steps:
            self._intervals_s.append(now - self._last_s)
            self._samples_since_first += self._samples
        else:
            self._first_step_s = now - self._started_s
            self.device = str(optimizer.param_groups[0]["params"][0].device)
        self._samples = 0
        self._sampled = None
        self.steps = count
        self._last_s = now
        for listen in self.on_step:
            listen(count)

    def stats(self, compile_s: float) -> StepStats:
        """Give speed and memory so far; see `StepStats` for units."""
        intervals = sorted(self._intervals_s)
        median_s = statistics.median(intervals) if intervals else 0.0
        timed = self.steps - self._timed_from
        samples = self._samples_since_first / timed if timed > 0 else 0.0
        return StepStats(
            steps=self.steps,
            median_step_s=median_s,
            p95_step_s=intervals[int(0.95 * (len(intervals) - 1))] if intervals else 0.0,
            # By the median, not by the clock: pauses to compile or validate are no training speed.
            samples_per_s=samples / median_s if median_s else 0.0,
            first_step_s=self._first_step_s,
            compile_s=compile_s,
            peak_memory_bytes=peak_memory_bytes(),
            wall_s=time.perf_counter() - self._started_s,
        )

    def recent_step_s(self) -> float:
        """Give the time of the last step, in seconds; 0 before the second one."""
        return self._intervals_s[-1] if self._intervals_s else 0.0


def peak_memory_bytes() -> int:
    """Give the peak of the accelerator's allocator, or of resident memory on a CPU."""
    for device in (torch.cuda, getattr(torch, "npu", None)):  # torch_npu brings torch.npu
        module: Any = device
        if module is not None and module.is_initialized() and module.is_available():
            return int(module.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
