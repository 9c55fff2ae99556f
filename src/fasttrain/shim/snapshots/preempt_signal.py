"""Notes that the run is to be preempted; listens before torch is there, which takes seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any


class Asked:
    """Whether a signal has come.

    Attributes:
        flag: Whether one has come since this process started.
    """

    def __init__(self) -> None:
        self.flag = False
        self._signums: list[int] = []
        self._before: dict[int, Any] = {}

    def listen(self, names: Iterable[str]) -> None:
        """Take signals, such as ``SIGUSR2``, instead of dying of them."""
        self._signums = [int(signal.Signals[name]) for name in names]
        for signum in self._signums:
            self._before[signum] = signal.signal(signum, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signums)  # held back by the launcher
        os.register_at_fork(after_in_child=self._leave_to_the_child)

    @property
    def heard(self) -> bool:
        """True if the first of them still comes here; a script may have taken it for itself."""
        return signal.getsignal(self._signums[0]) == self._note

    def _leave_to_the_child(self) -> None:
        """Have SIGTERM end what the script forks: `Process.terminate` sends it, and so do pools.

        The warning goes on to do nothing there. SLURM sends it to all processes of a step, and a
        DataLoader worker that died of it would end the run before its snapshot.
        """
        self.flag = False
        before = self._before.get(signal.SIGTERM)
        if before is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, before)

    def _note(self, *_: Any) -> None:
        self.flag = True


ASKED = Asked()  # of this process: signals have no other owner
