"""How a run ends that somebody asked to end: with time to save, but not for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from fasttrain.model.errors import ExitCode

INTERRUPTED = "Interrupted"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.5  # `timeout` and others send one signal to a process and to its group
REMIND_S = 1.0  # most scripts have ended by then, and no message is needed


class Stop:
    """The end of a run as asked for by signals.

    Attributes:
        signum: The first signal that asked for it; 0 while none did.
        now: Whether a second ctrl-C asked for it at once.
        preempted: Whether the run was asked to end after a snapshot.

    Args:
        grace_s: Seconds that the run has to end in.
        tell: Prints a message to the user.
        heard: Called with each signal to this process.
        save: Signal at which the run saves a snapshot and ends, sent instead of SIGTERM; 0 without.
    """

    def __init__(
        self,
        grace_s: float,
        tell: Callable[[str], None],
        heard: Callable[[int], None] = lambda _signum: None,
        save: int = 0,
    ) -> None:
        self.signum = 0
        self.now = self.preempted = False
        self.grace_s = grace_s
        self._tell = tell
        self._heard = heard
        self._save = save
        self._since_s = 0.0
        self._reminded = False

    def hear(self, signum: int) -> None:
        """Note a signal to this process."""
        self._heard(signum)
        self.preempted |= bool(self._save) and signum in (self._save, signal.SIGTERM)
        # A signal that the caller ignores, as under nohup, is ignored by the script as well.
        if signum not in STOPPING or signal.getsignal(signum) == signal.SIG_IGN:
            return
        if not self.signum:
            self.signum, self._since_s = signum, time.monotonic()
        elif signum == signal.SIGINT and self._age_s() >= AGAIN_S:
            self.now = True

    def passed_on(self, signum: int, sender: int) -> int:
        """Return the signal that the run is sent for a signal to this process.

        The first SIGTERM from outside becomes the signal to save a snapshot. SIGTERM itself is
        passed on if this process sent it to itself, because the run hangs, or if it came again.
        """
        first = self._age_s() < AGAIN_S
        if signum != signal.SIGTERM or not self._save or sender == os.getpid() or not first:
            return signum
        return self._save

    @property
    def exit_code(self) -> int:
        """Exit code of a run that was asked to end between two attempts."""
        if self.preempted and self.signum in (0, signal.SIGTERM):
            return ExitCode.PREEMPTED  # the run can resume from the snapshot on the disk
        return 128 + self.signum

    def due(self) -> bool:
        """True if what still runs is to be killed now."""
        if not self.signum:
            return False
        age_s = self._age_s()
        if age_s >= REMIND_S and not self._reminded:
            self._reminded = True
            name = signal.Signals(self.signum).name
            ended = INTERRUPTED if self.signum == signal.SIGINT else name
            self._tell(
                f"{ended}. Waiting up to {self.grace_s:g} s for the script to save;"
                " ctrl-C again ends it now."
            )
        return self.now or age_s >= self.grace_s

    def _age_s(self) -> float:
        return time.monotonic() - self._since_s
