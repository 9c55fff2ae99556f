"""A checkpoint that won't fit is told of before it is tried."""

from __future__ import annotations

import io
import os
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fasttrain.shim.watch.save_guard import SaveGuard

SMALL, LARGE = torch.zeros(16), torch.zeros(100_000)


@pytest.fixture
def guard() -> Iterator[SaveGuard]:
    with ExitStack() as undo:
        made = SaveGuard()
        made.install(undo)
        yield made


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the file system say that so much is free."""

    def say(number_bytes: int) -> None:
        blocks = SimpleNamespace(
            f_bavail=number_bytes, f_frsize=1, f_blocks=1, f_favail=1, f_files=1
        )
        monkeypatch.setattr(os, "statvfs", lambda _: blocks)

    return say


def test_the_next_one_like_it_is_foreseen_once(
    guard: SaveGuard, free: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free(200_000)
    torch.save(LARGE, tmp_path / "step-1.pt")
    assert guard.warnings == []
    torch.save(SMALL, tmp_path / "rng-1.pt")
    torch.save(SMALL, tmp_path / "rng-2.pt")
    assert guard.warnings == [], "a small file of another kind fits"
    torch.save(LARGE, tmp_path / "step-2.pt")
    (warning,) = guard.warnings
    assert f"{tmp_path}/step-2.pt " in warning
    assert re.findall(r"\d+ KiB", warning) == ["392 KiB", "195 KiB"]
    assert capsys.readouterr().err == f"fasttrain: warning: {warning}\n"
    assert (tmp_path / "step-2.pt").stat().st_size > 400_000, "it was tried all the same"


def test_one_that_is_written_over_gives_its_room(
    guard: SaveGuard, free: Any, tmp_path: Path
) -> None:
    free(10_000)
    for _ in range(3):
        torch.save(LARGE, str(tmp_path / "last.pt"))
    assert guard.warnings == []


def test_without_limits_nothing_is_foreseen(
    guard: SaveGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = SimpleNamespace(f_bavail=0, f_frsize=1, f_blocks=0, f_favail=0, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda _: none)
    for step in range(3):
        torch.save(SMALL, tmp_path / f"{step}.pt")
    assert guard.warnings == []


def test_what_is_no_file_and_what_cannot_be_asked_are_left_alone(
    guard: SaveGuard, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    torch.save(SMALL, buffer)
    assert buffer.tell() > 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not exist"):
            torch.save(SMALL, tmp_path / "nowhere" / "1.pt")
    assert guard.warnings == []


def test_no_frame_of_it_is_in_a_failed_save(guard: SaveGuard, tmp_path: Path) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)) as failed:
        torch.save(lambda: None, tmp_path / "1.pt")
    frames = traceback.extract_tb(failed.value.__traceback__)
    assert not [frame for frame in frames if "fasttrain/shim" in frame.filename]


def test_torch_is_as_it_was_behind_it() -> None:
    before = (torch.save, torch.serialization._check_save_filelike)
    with ExitStack() as undo:
        SaveGuard().install(undo)
        assert torch.save is before[0]
    assert (torch.save, torch.serialization._check_save_filelike) == before
