"""How long a step waits for a DataLoader without workers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fasttrain.shim.tune import epochs
from fasttrain.shim.tune.epochs import Reading


class Slow(Dataset[Any]):
    """Takes a second for a row, by a clock of its own."""

    now_s = 0.0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        Slow.now_s += 1.0
        return index


@pytest.mark.parametrize(
    ("workers", "gradients", "seconds"), [(0, True, 4.0), (0, False, 0.0), (1, True, 0.0)]
)
def test_only_what_a_step_waits_for_counts(
    monkeypatch: Any, workers: int, gradients: bool, seconds: float
) -> None:
    monkeypatch.setattr(epochs.time, "perf_counter", lambda: Slow.now_s)
    reading = Reading()
    with ExitStack() as undo, torch.set_grad_enabled(gradients):
        reading.install(undo)
        for _ in DataLoader(Slow(), 4, num_workers=workers):
            Slow.now_s += 0.5
            reading.after_step()
    assert reading.step_s == seconds


def test_without_a_loader_nothing_is_read() -> None:
    reading = Reading()
    reading.after_step()
    assert reading.step_s == 0.0
