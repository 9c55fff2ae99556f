"""The warning signal of SLURM: time to save, and an end before SLURM's own."""

from __future__ import annotations

import os
import signal
import time

# What torchrun gives its workers between SIGTERM and SIGKILL, and a little for queueing again.
SHUTDOWN_S = 35.0


class EndWatch:
    """Follows a run for the signal that comes before its time is over.

    The run goes on with the signal, which reached its workers too, until it ends by itself or the
    time to shut down has come.

    Attributes:
        warned: Whether the signal came.
        stopped: Whether something had the run end: SLURM, a user, or this watch.
    """

    def __init__(self, name: str, lead_s: int) -> None:
        self.warned = False
        self.stopped = False
        self._signum = signal.Signals["SIG" + name]
        self._patience_s = max(lead_s - SHUTDOWN_S, lead_s / 2)
        self._due_s = 0.0

    def heard(self, signum: int) -> None:
        """Take note of a signal that was passed on to the run."""
        if signum == self._signum and not self.warned:
            self.warned = True
            self._due_s = time.monotonic() + self._patience_s
        if signum in (signal.SIGTERM, signal.SIGINT):
            self.stopped = True

    def tick(self) -> None:
        """End a run that goes on until shortly before SLURM would kill it."""
        if self.warned and not self.stopped and time.monotonic() > self._due_s:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGTERM)
