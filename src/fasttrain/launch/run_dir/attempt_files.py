"""Puts the records of a failed attempt aside, and marks its end in the logs."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

from fasttrain.files.writing import give_back
from fasttrain.model.attempts import DIVIDER, attempt_folder
from fasttrain.model.crash import CRASH_FILE, EXITS_FILE
from fasttrain.model.hang import HANG_FILE
from fasttrain.model.outcome import RECEIPT_FILE

_LINE = re.compile(rf"^{DIVIDER}.*\n?", re.MULTILINE)
# Files that ranks and launcher write about one attempt; whatever else is there is the script's.
RECORDS = (
    "failure-*.json", "fault-*.txt", "rank-*.json", "events-*.jsonl", "pulse-*.json",
    "stacks-*.txt", CRASH_FILE, HANG_FILE, RECEIPT_FILE, EXITS_FILE,
)  # fmt: skip

# Files that their writers have reserved room for.
_RESERVED = ("failure-*.json", EXITS_FILE)


def give_all_back(run_dir: Path) -> None:
    """Free the room that processes reserved for records which they did not write."""
    for path in (path for name in _RESERVED for path in run_dir.glob(f"{name}.tmp")):
        give_back(path.with_suffix(""))


def put_aside(run_dir: Path, number: int) -> str:
    """Move the records of an attempt into a folder, and return its name; empty without records.

    A job that SLURM queued again counts its attempts from 1 again; the next free name is taken.

    Raises:
        OSError: The disk is full, or the run directory is lost.
    """
    paths = [path for pattern in RECORDS for path in run_dir.glob(pattern)]
    if not paths:
        return ""
    names = (attempt_folder(one) for one in count(number))
    name = next(name for name in names if not (run_dir / name).exists())
    (run_dir / name).mkdir(mode=0o700)
    for path in paths:
        path.replace(run_dir / name / path.name)
    return name


def divide_logs(run_dir: Path, told: str) -> None:
    """Write a line into each rank's log that marks the end of an attempt.

    Raises:
        OSError: The disk is full, or the run directory is lost.
    """
    for path in run_dir.glob("rank-*.log"):
        with path.open("a+b") as log:
            log.seek(max(0, log.tell() - 1))
            begun = log.read() not in (b"", b"\n")
            log.write(b"\n" * begun + f"{DIVIDER}{told} ---\n".encode())


def of_last_attempt(text: str) -> str:
    """Return the part of a log that the last attempt wrote."""
    *_, last = _LINE.split(text)
    return last
