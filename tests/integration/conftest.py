"""Waits for what real processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

PATIENCE_S = 30.0


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait until a condition holds."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)

    return wait


@pytest.fixture
def only_run_dir(tmp_path: Path) -> Callable[[], Path]:
    """Give the one run directory that the test has made."""

    def find() -> Path:
        (run_dir,) = (tmp_path / "fasttrain_runs").iterdir()
        return run_dir

    return find


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Say whether a process lives, zombies excepted."""

    def check(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return check
