"""All descendants of this process, including those that lost their parents."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fasttrain.processes.table import Table, descendants, table

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Family:
    """The descendants of this process that were not there before.

    Attributes:
        before: Those that were.
    """

    def __init__(self) -> None:
        self.before = {*descendants([os.getpid()], table()).values()}

    def find(self, *spared: int) -> Table:
        """Return those that are alive.

        A shell may have become this process by ``exec``; its children are not part of the run.

        Args:
            spared: Processes that are left out, with their descendants.
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
    """Become the parent of descendants whose own parent ends, in init's place (Linux only).

    So nothing that a script starts can escape from its launcher, whatever it changes of its
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
