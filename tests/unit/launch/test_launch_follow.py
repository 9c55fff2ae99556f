from __future__ import annotations

import os
from pathlib import Path

from fasttrain.launch.output.relay import EventTail, RankTails, Tail


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_file_that_comes_later_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    append(path, b"one\ntw")
    assert list(tail.lines()) == [b"one\n"]
    assert list(tail.lines()) == []
    append(path, b"o\nthree\nfou")
    assert list(tail.lines()) == [b"two\n", b"three\n"]
    assert list(tail.lines(rest=True)) == [b"fou"]
    assert list(tail.lines(rest=True)) == []


def test_what_is_no_file_has_no_lines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert list(Tail(tmp_path / "pipe").lines()) == []
    assert list(Tail(tmp_path).lines()) == []


def test_the_newest_event(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    events = EventTail(path)
    assert events.latest() is None
    append(path, b'{"step": 1}\n{"step": 2}\n{"st')
    assert events.latest() == {"step": 2}
    assert events.latest() is None
    append(path, b'ep": 3}\n')
    assert events.latest() == {"step": 3}


def test_what_is_no_event_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    events = EventTail(path)
    for line in (b"{cut\n", b"[1]\n", b"\xff\n", b"\n"):
        append(path, line)
        assert events.latest() is None
    append(path, b'{"step": 4}\n')
    assert events.latest() == {"step": 4}


def test_shown_ranks_stand_before_their_lines(tmp_path: Path) -> None:
    tails = RankTails(tmp_path, lambda rank: rank in (1, 10))
    assert list(tails.lines()) == []
    append(tmp_path / "rank-10.log", b"ten\nhalf")
    append(tmp_path / "rank-1.log", b"one\r\n")
    append(tmp_path / "rank-2.log", b"hidden\n")
    append(tmp_path / "rank-of-mine.log", b"not ours\n")
    assert list(tails.lines()) == [b"[rank 1] one\r\n", b"[rank 10] ten\n"]
    assert list(tails.lines(rest=True)) == [b"[rank 10] half\n"]
