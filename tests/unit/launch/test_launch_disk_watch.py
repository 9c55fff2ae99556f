from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.launch.run_node import NOTHING_FREE, DiskWatch

MIB = 1 << 20
PLENTY = {"f_bavail": 1 << 40, "f_favail": 1 << 20, "f_blocks": 1, "f_files": 1, "f_frsize": 1}


class Disk:
    """A disk as statvfs tells it, and the watch that looks at it every ten seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.told: list[str] = []
        self._now_s = 0.0
        self._state: Any = PLENTY
        monkeypatch.setattr(os, "statvfs", lambda _: self._ask())
        self.watch = DiskWatch(Path("/runs/r"), ranks, self.told.append, lambda: self._now_s)

    def _ask(self) -> Any:
        if isinstance(self._state, OSError):
            raise self._state
        return SimpleNamespace(**self._state)

    def is_now(
        self, error: OSError | None = None, after_s: float = 11, **changes: int
    ) -> list[str]:
        """Return what was told newly."""
        self._state = error or {**PLENTY, **changes}
        self._now_s += after_s
        before = len(self.told)
        self.watch.tick()
        return self.told[before:]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch, ranks=8)


def test_with_plenty_there_is_nothing_to_tell(disk: Disk) -> None:
    assert disk.is_now() == disk.is_now(f_bavail=1 << 30) == []


def test_each_state_is_told_once_with_its_size(disk: Disk) -> None:
    (few,) = disk.is_now(f_bavail=700 * MIB)
    assert " 700 MiB " in few
    assert " /runs/r" in few
    assert disk.is_now(f_bavail=600 * MIB) == []
    (full,) = disk.is_now(f_bavail=0)
    assert NOTHING_FREE in full
    assert disk.is_now() == disk.is_now(f_bavail=0) == []
    assert [f"warning: {text}" for text in disk.watch.warnings] == disk.told == [few, full]


def test_files_can_run_out_before_bytes_do(disk: Disk) -> None:
    assert disk.is_now(f_favail=92) == []  # 8 ranks with 9 each, and 20 of the run
    (few,) = disk.is_now(f_favail=91)
    assert " 91 " in few


def test_a_file_system_that_counts_nothing_is_not_full(disk: Disk) -> None:
    assert disk.is_now(f_blocks=0, f_bavail=0, f_files=0, f_favail=0) == []


def test_it_is_asked_every_ten_seconds(disk: Disk) -> None:
    assert disk.is_now() == disk.is_now(f_bavail=0, after_s=9) == []
    assert disk.is_now(f_bavail=0, after_s=2) != []


def test_a_disk_that_cannot_be_asked_is_told_once(disk: Disk) -> None:
    gone = OSError(errno.ESTALE, "Stale file handle")
    (told,) = disk.is_now(gone)
    assert "Stale file handle" in told
    assert disk.is_now(gone) == []
