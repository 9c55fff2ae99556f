"""Knows what is ahead of a run: how long it lasts, and what compiling would cost it."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from fasttrain.shim.compile_auto import rule
from fasttrain.shim.compile_auto.rule import Choice, Prospect
from fasttrain.shim.hooks.loop import known_epoch, on_batch
from fasttrain.shim.hooks.outcome_recorder import Shared
from fasttrain.shim.process import entry, true_clock

CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


class StepClock:
    """Times steps, from the end of one to the end of the next.

    Attributes:
        taken_s: Time of the last step.
        last_s: When it ended.
        first_s: When the first step ended.
    """

    def __init__(self) -> None:
        self.taken_s = self.last_s = self.first_s = 0.0

    def tick(self) -> None:
        """Note that a step ends."""
        now_s = true_clock.perf_counter()
        self.taken_s, self.last_s = now_s - self.last_s, now_s
        self.first_s = self.first_s or now_s

    @property
    def elapsed_s(self) -> float:
        """How long ago the first step ended."""
        return true_clock.perf_counter() - self.first_s


class Outlook:
    """Makes the prospect that is decided by.

    Args:
        shared: What the levers share.
        clock: Times the steps.
    """

    def __init__(self, shared: Shared, clock: StepClock) -> None:
        self._meter, self._clock = shared.meter, clock
        self._earlier, self._max_steps = shared.plan.earlier, shared.plan.max_steps or 0
        self._batches = self._first_batch = 0
        self._loader: Any = None

    def install(self, undo: ExitStack) -> None:
        """Watch the batches of loaders."""
        on_batch(self._see_batch, undo)

    def begin(self) -> None:
        """Count batches from now on: those before the first step may be of something else."""
        self._first_batch = self._batches

    def prospect(self, step_s: float, parts: int, *, forks: bool) -> Prospect:
        """Return what is known now.

        Args:
            step_s: Time of a plain step.
            parts: Number of modules to be compiled that have none inside.
            forks: Whether they would be compiled in the background.
        """
        earlier = self._earlier
        stall_s, compile_s = rule.guess_stall(parts), rule.guess_compilation(parts)
        if earlier is not None and earlier.stall_s:
            stall_s = earlier.stall_s
        if earlier is not None and earlier.compile_s:
            compile_s = min(compile_s, earlier.compile_s)
        if earlier is not None and earlier.background_s:
            # It takes longer on a busy machine, but no more of the processors' time.
            compile_s = max(earlier.slowed_s, min(compile_s, earlier.background_s))
        if self.warm:  # the copy imports, traces and loads, as the switch does
            compile_s = min(compile_s, stall_s)
        return Prospect(
            step_s=step_s,
            elapsed_s=self._clock.elapsed_s,
            steps_left=self._steps_left(),
            at_least_left=self._at_least_left(),
            cost_s=stall_s if forks and has_idle_core() else stall_s + compile_s,
            ratio=earlier.ratio if earlier else None,
        )

    @property
    def warm(self) -> bool:
        """True if an earlier run left all graphs in the cache that this one has, as far as known.

        Its key says that the script, the arguments, the levers and the versions are the same. What
        was taken out of the cache since isn't known.
        """
        cache = self._earlier.cache if self._earlier is not None else ""
        if not cache or os.environ.get(CACHE_FOLDER) != cache:
            return False
        with suppress(OSError):
            return any(Path(cache).iterdir())
        return False

    def decide(self, prospect: Prospect, *, tries: bool) -> Choice:
        """Return whether to compile now, later or never.

        Args:
            prospect: What is known.
            tries: Whether it is compiled without an earlier run that was faster compiled.
        """
        if self._earlier is not None and self._earlier.dropped:
            why = f"dropped on {self._earlier.date}: {self._earlier.dropped}"
            return Choice("never", f"it would not pay: {why}")
        if not tries and prospect.ratio is None:
            return Choice("never", (
                "the training would wait for the compilation on this device, and no earlier run"
                " with --compile default says that it is faster"
            ))  # fmt: skip
        return rule.decide(prospect)

    def _steps_left(self) -> int | None:
        known = self._earlier.steps if self._earlier else 0
        lengths = [n for n in (known, self._max_steps) if n > self._meter.steps]
        return min(lengths) - self._meter.steps if lengths else None

    def _at_least_left(self) -> int:
        """Return the steps that the rest of this data-loader epoch makes."""
        iterator = self._loader() if self._loader is not None else None
        batches = self._batches - self._first_batch
        if iterator is None or not batches:
            return 0
        epoch = known_epoch(iterator)
        if epoch is None:
            return 0
        left = epoch.batches - iterator._num_yielded
        return max(0, int(left * min(1.0, (self._meter.steps - 1) / batches)))

    def _see_batch(self, iterator: Any, _: Any) -> None:
        if torch.is_grad_enabled():
            self._batches += 1
            if self._loader is None or self._loader() is not iterator:
                self._loader = ref(iterator)


def has_idle_core() -> bool:
    """True if neither this process nor others, such as other ranks, use one of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    threads = torch.get_num_threads() * int(entry.get("LOCAL_WORLD_SIZE", "1"))
    return cores - max(float(threads), os.getloadavg()[0]) > 0.5
