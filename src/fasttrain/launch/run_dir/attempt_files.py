"""Puts the records of an attempt that failed aside, and divides the logs behind it."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

from fasttrain.files.writing import give_back
from fasttrain.model.attempts import DECIDED_FILE, DIVIDER, VERDICT_FILE, attempt_folder
from fasttrain.model.crash import CRASH_FILE, EXITS_FILE
from fasttrain.model.hang import HANG_FILE
from fasttrain.model.outcome import RECEIPT_FILE

_LINE = re.compile(rf"^{DIVIDER}.*\n?", re.MULTILINE)
# What the ranks and the launcher write of one attempt; whatever else lies there is the script's.
RECORDS = (
    "failure-*.json", "fault-*.txt", "rank-*.json", "events-*.jsonl", "pulse-*.json",
    "stacks-*.txt", CRASH_FILE, HANG_FILE, RECEIPT_FILE, EXITS_FILE, VERDICT_FILE,
)  # fmt: skip

# What room is kept for, by whoever writes it.
_KEPT_FOR = ("failure-*.json", EXITS_FILE, VERDICT_FILE, DECIDED_FILE)


def give_all_back(run_dir: Path) -> None:
    """Give up the room that processes kept for their records, and had no use for or no time."""
    for path in (path for name in _KEPT_FOR for path in run_dir.glob(f"{name}.tmp")):
        give_back(path.with_suffix(""))


def put_aside(run_dir: Path, number: int) -> str:
    """Move the records of an attempt into a folder of their own, and give its name; empty without.

    The file for which an agent waits goes last. A job that SLURM queued again counts anew.

    Raises:
        OSError: The disk is full, or the run directory is lost.
    """
    paths = [path for pattern in (*RECORDS, DECIDED_FILE) for path in run_dir.glob(pattern)]
    if not paths:
        return ""
    names = (attempt_folder(one) for one in count(number))
    name = next(name for name in names if not (run_dir / name).exists())
    (run_dir / name).mkdir(mode=0o700)
    for path in paths:
        path.replace(run_dir / name / path.name)
    return name


def divide_logs(run_dir: Path, told: str) -> None:
    """Write a line into each rank's log that tells where an attempt ends.

    Raises:
        OSError: The disk is full, or the run directory is lost.
    """
    for path in run_dir.glob("rank-*.log"):
        with path.open("a+b") as log:
            log.seek(max(0, log.tell() - 1))
            begun = log.read() not in (b"", b"\n")
            log.write(b"\n" * begun + f"{DIVIDER}{told} ---\n".encode())


def behind_divider(text: str) -> str:
    """Return what the last attempt wrote into a log."""
    *_, last = _LINE.split(text)
    return last
