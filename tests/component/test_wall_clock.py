"""What takes time is measured by clocks that nobody sets; the time of day only goes on record."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fasttrain

PACKAGE = Path(fasttrain.__file__).parent
# Each gives a time of day to people, beside a monotonic one where an order follows from it.
ON_RECORD = {
    "shim/reporter.py", "agent/worker_exits.py", "shim/script.py", "launch/crash/evidence.py",
    "launch/run_dir/paths.py", "cli/tuned.py", "cli/history.py",
    "slurm/node_task.py",  # machines share no other clock
    "slurm/submission.py",
    # Compared with the times of files, which have no other clock.
    "shim/snapshots/replayed_files.py",
}  # fmt: skip


def wall_clocks(tree: ast.AST) -> Iterator[int]:
    """Return the lines that ask for the time of day."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("time"), attr="time" | "time_ns" | "localtime"):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr="now" | "utcnow" | "today")):
                yield node.lineno
            case ast.ImportFrom(module="time"):
                yield node.lineno


def test_the_time_of_day_is_seen() -> None:
    for code in ("time.time()", "clock=time.time_ns", "datetime.now()", "from time import time"):
        assert list(wall_clocks(ast.parse(code))) == [1]
    assert list(wall_clocks(ast.parse("time.monotonic(); time.perf_counter_ns()"))) == []


def test_only_records_hold_the_time_of_day() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(wall_clocks(ast.parse(path.read_bytes())))
    }
    assert found == ON_RECORD
