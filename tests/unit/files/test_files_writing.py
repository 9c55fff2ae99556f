from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fasttrain import files
from fasttrain.files import RESERVED_BYTES, Lines, give_back, reserve, write_private


def test_a_private_file_replaces_one_that_was_open_to_others(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "é\udcff")
    assert path.read_text(encoding="utf-8") == "é?"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "receipt.json"
    write_private(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_private(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_private(path, "new", durable=False)
    assert path.read_text() == "new"


def test_room_that_was_reserved_is_written_and_what_is_left_given_back(tmp_path: Path) -> None:
    path = tmp_path / "failure-0.json"
    reserve(path)
    (draft,) = tmp_path.iterdir()
    assert draft.stat().st_blocks * 512 >= RESERVED_BYTES
    write_private(path, "short")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "short"
    reserve(path)
    give_back(path)
    give_back(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    for name in ("receipt.json.tmp", "events-0.jsonl"):
        (tmp_path / name).symlink_to("target")
    with pytest.raises(OSError, match="symbolic links"):
        write_private(tmp_path / "receipt.json", "new")
    with pytest.raises(OSError, match="symbolic links"):
        Lines(tmp_path / "events-0.jsonl").add("line")
    assert (tmp_path / "target").read_text() == "mine"


def test_each_line_is_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: calls.append(data) or write(to, data))
    lines = Lines(tmp_path / "events")
    lines.add("a" * 100_000)
    lines.add("b")
    assert calls == [b"a" * 100_000 + b"\n", b"b\n"]


def test_behind_half_a_line_a_new_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [5]
    write = os.write

    def fill(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(files.os, "write", fill)
    lines = Lines(tmp_path / "events")
    lines.add("ab")
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            lines.add("cdef")
    room[0] = 100
    lines.add("gh")
    assert (tmp_path / "events").read_text() == "ab\ncd\ngh\n"


def test_half_a_line_of_a_process_before_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("ab\ncd")
    lines: Any = Lines(path)
    lines.add("ef")
    lines.add("gh")
    assert path.read_text() == "ab\ncd\nef\ngh\n"
