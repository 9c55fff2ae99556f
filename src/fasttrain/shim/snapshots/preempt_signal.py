"""Notes the signal that announces a preemption; installed before torch's import (seconds)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any


class PreemptSignal:
    """Records whether a preemption signal has arrived.

    Attributes:
        flag: True if one has arrived since this process started.
    """

    def __init__(self) -> None:
        self.flag = False
        self._signums: list[int] = []
        self._before: dict[int, Any] = {}

    def listen(self, names: Iterable[str]) -> None:
        """Handle these signals, such as ``SIGUSR2``, whose default action ends the process."""
        self._signums = [int(signal.Signals[name]) for name in names]
        for signum in self._signums:
            self._before[signum] = signal.signal(signum, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signums)  # held back by the launcher
        os.register_at_fork(after_in_child=self._leave_to_the_child)

    @property
    def heard(self) -> bool:
        """True if the first of them still has this handler; a script may install its own."""
        return signal.getsignal(self._signums[0]) == self._note

    def _leave_to_the_child(self) -> None:
        """Let SIGTERM end forked children again: `Process.terminate` and pools rely on it.

        The warning signal stays ignored there: SLURM sends it to all processes of a job step, and
        a DataLoader worker killed by it would end the run before its snapshot.
        """
        self.flag = False
        before = self._before.get(signal.SIGTERM)
        if before is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, before)

    def _note(self, *_: Any) -> None:
        self.flag = True


PREEMPT_SIGNAL = PreemptSignal()  # signal handlers belong to the process, hence one per process
