"""When each of the agent's workers ended, to the millisecond, and how.

torchrun polls its workers ten times a second, and reports all that ended between two polls with
the same time. SIGCHLD comes at once, so the order in which ranks failed is taken from it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fasttrain.files import reserve, write_private
from fasttrain.model.codec import dumps
from fasttrain.model.crash import EXITS_FILE, WorkerExit, WorkerExits
from fasttrain.processes.table import peak_of_children

_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children")


class ExitWatch:
    """Notes when children end; made before the first of them, in the main thread."""

    def __init__(self) -> None:
        self._seen_ns: dict[int, tuple[int, int]] = {}
        if _CHILDREN.exists():  # Linux; elsewhere torchrun's polling must do
            signal.signal(signal.SIGCHLD, self._look)
            # torch's own reads and writes are not interrupted
            signal.siginterrupt(signal.SIGCHLD, False)  # noqa: FBT003

    def _look(self, *_: Any) -> None:
        """Find all that have ended: children that end together raise one signal."""
        now_ns = _now_ns()
        for pid in children():
            if pid not in self._seen_ns and _has_ended(pid):
                self._seen_ns[pid] = now_ns

    @staticmethod
    def reserve(run_dir: Path) -> None:
        """Reserve room for the record of the exits, which may have to report a full disk."""
        try:
            reserve(run_dir / EXITS_FILE)
        except OSError as error:  # the disk is full already, and the launcher has said so
            print(f"fasttrain: no room is kept for {EXITS_FILE}: {error}", file=sys.__stderr__)

    def record(self, run_dir: Path, failures: Iterable[tuple[int, int, int]]) -> WorkerExits:
        """Return how the workers that failed have ended, and write it into the run directory.

        Args:
            run_dir: The run directory.
            failures: Rank, process and exit code, or minus a signal, of each.
        """
        now_ns = _now_ns()
        ends = tuple(
            WorkerExit(rank, pid, code, *self._seen_ns.get(pid, now_ns))
            for rank, pid, code in failures
        )
        exits = WorkerExits(ends, peak_of_children())
        try:
            write_private(run_dir / EXITS_FILE, dumps(exits))
        except OSError as error:  # the launcher is told by the pipe all the same
            print(f"fasttrain: how the ranks ended is not recorded: {error}", file=sys.__stderr__)
        return exits


def _now_ns() -> tuple[int, int]:
    """Return the time of day, which may be set, and the monotonic time, which orders exits."""
    return time.time_ns(), time.monotonic_ns()


def children() -> list[int]:
    """Return this process's children; the main thread has started all of them."""
    return list(map(int, _CHILDREN.read_text().split()))


def _has_ended(pid: int) -> bool:
    try:
        # WNOWAIT leaves the zombie in place: torchrun collects its exit code.
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # torchrun has just collected its exit code
        return True
