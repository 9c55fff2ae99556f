"""Metrics by which a script decides are those of the first time, however they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fasttrain.shim.snapshots import scalar_reads
from support.preempted import data, loss_of, network

Tick = Callable[[], None]


def by_arrays(tick: Tick) -> Any:
    """The accuracy of all predictions, of more than a page of memory, keeps the best weights."""
    model, best, accuracies = network(), {}, [0.0]
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(4):
        for x, y in DataLoader(data(), 8, shuffle=True):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            tick()
        found, wanted = [], []
        with torch.no_grad():
            for x, y in DataLoader(data(800, seed=2), 100):
                found.append((model(x).squeeze(1) > 0).long())
                wanted.append(y.long())
        hits = torch.cat(found).numpy() == torch.cat(wanted).numpy()
        if hits.mean() > max(accuracies):
            best = {name: value.clone() for name, value in model.state_dict().items()}
        accuracies.append(float(hits.mean()))
    return model.state_dict(), best, accuracies


def test_metrics_of_large_arrays_are_right(preempted: Any) -> None:
    assert preempted.differ(by_arrays, 27) == []


def test_arrays_that_are_too_large_are_reported(
    preempted: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalar_reads, "LARGE_BYTES", 5_000)
    for stop_at, resume in ((27, "no"), (0, "required")):
        preempted.attempt(by_arrays, stop_at, resume=resume)
        assert "test_snapshot_metrics.py:" in capfd.readouterr().err
