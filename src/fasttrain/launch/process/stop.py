"""How a run that somebody asked to end is ended: with time to save, and not for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from fasttrain.model.errors import ExitCode

INTERRUPTED = "Interrupted"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.5  # `timeout` and others send a signal to a process and to its group, as one
REMIND_S = 1.0  # most scripts have ended by then, and need no words


class Stop:
    """The end of a run as asked for by signals.

    Attributes:
        signum: The first signal that asked for it; 0 while none did.
        now: Whether somebody has lost patience.
        makes_room: Whether the run was asked to end behind a snapshot.

    Args:
        grace_s: Seconds that the run has to end in.
        tell: Says something to the user.
        heard: Called with each signal to this process.
        save: What has the run save itself and end; sent in SIGTERM's place, unless it is 0.
    """

    def __init__(
        self,
        grace_s: float,
        tell: Callable[[str], None],
        heard: Callable[[int], None] = lambda _signum: None,
        save: int = 0,
    ) -> None:
        self.signum = 0
        self.now = self.makes_room = False
        self.grace_s = grace_s
        self._tell = tell
        self._heard = heard
        self._save = save
        self._since_s = 0.0
        self._reminded = False

    def hear(self, signum: int) -> None:
        """Take note of a signal to this process."""
        self._heard(signum)
        self.makes_room |= bool(self._save) and signum in (self._save, signal.SIGTERM)
        # What the caller ignores, as nohup and background shells do, the script ignores as well.
        if signum not in STOPPING or signal.getsignal(signum) == signal.SIG_IGN:
            return
        if not self.signum:
            self.signum, self._since_s = signum, time.monotonic()
        elif signum == signal.SIGINT and self._age_s() >= AGAIN_S:
            self.now = True

    def passed_on(self, signum: int, sender: int) -> int:
        """Return what the run is sent for a signal to this process.

        Whoever ends it by SIGTERM gives it time to save; this process itself does so, by a signal
        to itself, where the run goes no further, and so does who sends it a second time.
        """
        first = self._age_s() < AGAIN_S
        if signum != signal.SIGTERM or not self._save or sender == os.getpid() or not first:
            return signum
        return self._save

    @property
    def exit_code(self) -> int:
        """What a run ends with that was asked to while none of its processes ran."""
        if self.makes_room and self.signum in (0, signal.SIGTERM):
            return ExitCode.PREEMPTED  # it goes on from what is on the disk
        return 128 + self.signum

    def due(self) -> bool:
        """Return whether what still runs is to be killed now."""
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
