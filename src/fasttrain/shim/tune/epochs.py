"""Finds how many steps an epoch has, and how long a step waits for its batch."""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.loop import known_epoch, on_batch

MOST_KNOWN_STEPS = 200


class Epochs:
    """Counts the batches that a DataLoader hands out between steps.

    Batches that are read without gradients belong to a validation.
    """

    def __init__(self) -> None:
        self._batches = self._steps = self._length = 0
        self._waiting = 0  # batches since the last step

    def install(self, undo: ExitStack) -> None:
        """Watch all DataLoaders."""
        on_batch(self._see, undo)

    @property
    def steps(self) -> float:
        """Steps of an epoch; 0 if no loader whose length is known feeds the training."""
        return self._length * self._steps / self._batches if self._batches else 0.0

    def after_step(self) -> None:
        """Count a step, and the batches since the one before."""
        if self._length:
            self._batches += self._waiting
            self._steps += 1
        self._waiting = 0

    def _see(self, iterator: Any, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        epoch = known_epoch(iterator)
        self._length = epoch.batches if epoch is not None else 0
        self._waiting += 1


class Reading:
    """Times DataLoaders that have no workers, as far as they feed the training."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._steps: deque[float] = deque(maxlen=MOST_KNOWN_STEPS)

    def install(self, undo: ExitStack) -> None:
        """Watch such DataLoaders."""
        patching.wrap(_SingleProcessDataLoaderIter, "_next_data", self._timed, undo)

    @property
    def step_s(self) -> float:
        """Seconds of a step that they take; 0 if there are none."""
        return statistics.median(self._steps) if self._steps else 0.0

    def after_step(self) -> None:
        """Begin the next step."""
        self._steps.append(self._spent_s)
        self._spent_s = 0.0

    def _timed(self, original: Any) -> Any:
        @functools.wraps(original)
        def _next_data(iterator: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return original(iterator)
            finally:
                if torch.is_grad_enabled():
                    self._spent_s += time.perf_counter() - began_s

        return _next_data
