"""Shows whether a signal to this process went to its whole process group."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fasttrain.launch.process.procfs import pending
from fasttrain.model.places import RUN_MARK

SHELL, WAITS = "/bin/sh", "read end"  # until the other end of its pipe closes
# `timeout`, a service manager or SLURM signal one process after the other.
SETTLE_S = 0.05


class Witness:
    """A process of this process's group that blocks all signals, which then stay pending.

    A script is in the same group. What is sent to the group (``timeout``, ``kill %1``), or to
    each process of a control group, has reached it, and must not arrive twice: the second one would
    interrupt the handler that saves a checkpoint. The kernel makes a signal pending for all
    processes of a group in one system call, whether they run meanwhile or not.

    Attributes:
        pid: Its number; 0 while there is none, and all signals seem to be for this process alone.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.pid = 0
        # Without the run's mark: it is not of the run.
        self._environ = {name: value for name, value in environ.items() if name != RUN_MARK}
        self._read, self._write = os.pipe()
        self._start()

    def __enter__(self) -> Witness:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for descriptor in (self._read, self._write):
            os.close(descriptor)

    def saw(self, signum: int) -> bool:
        """Return True if a signal that this process has got went to its group, too.

        A second one that came meanwhile counts as the same.
        """
        time.sleep(SETTLE_S)
        if not (self.pid and pending(self.pid, signum)):
            return False
        if signum in signal.sigpending():
            signal.sigwait({signum})
        self._end()
        self._start()
        return True

    def _start(self) -> None:
        if sys.platform != "linux":
            return
        null = os.devnull
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, self._read, 0),
            (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
        ]
        with suppress(OSError, ValueError):
            self.pid = os.posix_spawn(
                SHELL,
                (SHELL, "-c", WAITS),
                self._environ,
                file_actions=actions,
                setsigmask=signal.valid_signals(),
            )

    def _end(self) -> None:
        if not self.pid:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # reaped with the others
            os.waitpid(self.pid, 0)
        self.pid = 0
