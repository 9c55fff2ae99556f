"""How a run that somebody asked to end is ended: with time to save, and not for ever."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.5  # `timeout` and others send a signal to a process and to its group, as one
REMIND_S = 1.0  # most scripts have ended by then, and need no words


class Stop:
    """The end of a run as asked for by signals.

    Attributes:
        signum: The first signal that asked for it; 0 while none did.
        now: Whether somebody has lost patience.
    """

    def __init__(
        self,
        grace_s: float,
        tell: Callable[[str], None],
        heard: Callable[[int], None] = lambda _signum: None,
    ) -> None:
        self.signum = 0
        self.now = False
        self.grace_s = grace_s
        self._tell = tell
        self._heard = heard
        self._since_s = 0.0
        self._reminded = False

    def hear(self, signum: int) -> None:
        """Take note of a signal to this process."""
        self._heard(signum)
        # What the caller ignores, as nohup and background shells do, the script ignores as well.
        if signum not in STOPPING or signal.getsignal(signum) == signal.SIG_IGN:
            return
        if not self.signum:
            self.signum, self._since_s = signum, time.monotonic()
        elif signum == signal.SIGINT and self._age_s() >= AGAIN_S:
            self.now = True

    def due(self) -> bool:
        """Whether what still runs is to be killed now."""
        if not self.signum:
            return False
        age_s = self._age_s()
        if age_s >= REMIND_S and not self._reminded:
            self._reminded = True
            name = signal.Signals(self.signum).name
            self._tell(
                f"{name} was passed on; what still runs {self.grace_s:g} s after it is killed, "
                "or at the next ctrl-C"
            )
        return self.now or age_s >= self.grace_s

    def _age_s(self) -> float:
        return time.monotonic() - self._since_s
