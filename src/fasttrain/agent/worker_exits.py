"""When each of the agent's workers died, to the millisecond, and how.

torchrun looks after its workers ten times a second, and what died between two looks died at the
same time to it. The kernel tells at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fasttrain.files.writing import reserve, write_private
from fasttrain.model.codec import dumps
from fasttrain.model.crash import EXITS_FILE, WorkerExit, WorkerExits
from fasttrain.processes.table import peak_of_children

_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children")


class Deaths:
    """Notes when children end; made before the first of them, in the main thread."""

    def __init__(self) -> None:
        self._seen_ns: dict[int, tuple[int, int]] = {}
        if _CHILDREN.exists():  # Linux; elsewhere torchrun's looks must do
            signal.signal(signal.SIGCHLD, self._look)
            # torch's own reads and writes go on
            signal.siginterrupt(signal.SIGCHLD, False)  # noqa: FBT003

    def _look(self, *_: Any) -> None:
        """Find all that have ended: signals of children that end together come as one."""
        now_ns = _now_ns()
        for pid in children():
            if pid not in self._seen_ns and _has_ended(pid):
                self._seen_ns[pid] = now_ns

    def keep_room(self, run_dir: Path, *names: str) -> None:
        """Take the room for the ends, and other files, that are left when a disk is full."""
        for name in (EXITS_FILE, *names):
            try:
                reserve(run_dir / name)
            except OSError as error:  # the disk is full already, and the launcher has told that
                print(f"fasttrain: no room is kept for {name}: {error}", file=sys.__stderr__)

    def leave(self, run_dir: Path, failures: Iterable[tuple[int, int, int]]) -> bool:
        """Write the ends of the workers that failed, and say whether that could be done.

        Args:
            run_dir: The run directory.
            failures: Rank, process and exit code, or minus a signal, of each.
        """
        now_ns = _now_ns()
        ends = tuple(
            WorkerExit(rank, pid, code, *self._seen_ns.get(pid, now_ns))
            for rank, pid, code in failures
        )
        try:
            write_private(run_dir / EXITS_FILE, dumps(WorkerExits(ends, peak_of_children())))
        except OSError as error:  # the exit code must get through all the same
            print(f"fasttrain: how the ranks ended is not recorded: {error}", file=sys.__stderr__)
            return False
        return True


def _now_ns() -> tuple[int, int]:
    """Return the time of day, and that of the clock that nobody sets."""
    return time.time_ns(), time.monotonic_ns()


def children() -> list[int]:
    """Return this process's children; they were all started by the main thread."""
    return list(map(int, _CHILDREN.read_text().split()))


def _has_ended(pid: int) -> bool:
    try:
        # Left as it is: torchrun collects its exit code.
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # torchrun has just collected it
        return True
