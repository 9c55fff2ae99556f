"""All processes that descend from this one, those that lost their parents included."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fasttrain.processes.table import Table, descendants, table

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Family:
    """What descends from this process, and had not been there before.

    Attributes:
        before: What had been.
    """

    def __init__(self) -> None:
        self.before = {*descendants([os.getpid()], table()).values()}

    def find(self, *spared: int) -> Table:
        """Return those that are alive.

        A shell may have become this process by ``exec``; its children are not of the run.

        Args:
            spared: Those that don't count, nor what they started.
        """
        processes = table()
        for process in self.before:
            if processes.get(process.pid) == process:
                del processes[process.pid]
        for pid in spared:
            processes.pop(pid, None)
        return descendants([os.getpid()], processes)


@contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of all descendants whose own parent ends, as init else does (Linux only).

    So nothing that a script starts gets away from its launcher, whatever it does to its
    environment, session or name.
    """
    if sys.platform != "linux":
        yield
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
