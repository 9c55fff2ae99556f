"""A script that loads, where it begins, what it has saved in the run before."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.shim.snapshots.replayed_files import OwnCheckpoints

FIRST_STEP_S = time.time() - 100


@pytest.fixture
def looking() -> Iterator[OwnCheckpoints]:
    with ExitStack() as undo:
        checkpoints = OwnCheckpoints()
        checkpoints.look_out(FIRST_STEP_S, undo)
        yield checkpoints
    assert torch.load.__module__ == "torch.serialization"


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Save at a time relative to the first step, in seconds."""

    def save(after_s: float) -> Path:
        path = tmp_path / "last.pt"
        torch.save({"epoch": 3}, path)
        os.utime(path, (FIRST_STEP_S + after_s,) * 2)
        return path

    return save


def test_what_was_saved_behind_the_first_step_is_refused(
    looking: OwnCheckpoints, saved: Any, capfd: Any
) -> None:
    path = saved(50)
    with path.open("rb") as file:
        for load in (
            lambda: torch.load(path), lambda: torch.load(f=str(path)), lambda: torch.load(file)
        ):  # fmt: skip
            with pytest.raises(SystemExit):
                load()
    assert capfd.readouterr().err.count("[snapshot-checkpoint]") == 3
    looking.begin()
    assert torch.load(path) == {"epoch": 3}
    assert looking.since_s == FIRST_STEP_S


def test_what_was_there_before_is_data(looking: OwnCheckpoints, saved: Any, tmp_path: Path) -> None:
    assert torch.load(saved(-50)) == {"epoch": 3}
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "none.pt")


def test_the_first_step_is_that_of_the_first_attempt() -> None:
    checkpoints = OwnCheckpoints()
    checkpoints.begin()
    assert time.time() - 60 < checkpoints.since_s <= time.time()
