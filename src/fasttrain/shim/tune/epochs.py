"""Finds how many steps an epoch has."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from fasttrain.shim.hooks.loop import on_batch


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
        """Steps of an epoch; 0 if no loader that knows its length feeds the training."""
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
        try:
            self._length = len(iterator)
        except (TypeError, NotImplementedError):  # an IterableDataset may have none
            self._length = 0
        self._waiting += 1
