"""ctrl-Z: what a run has started stands still with its launcher, and goes on with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from fasttrain.processes.table import Table, send


def stand_still(find: Callable[[], Table]) -> None:
    """Stop processes and this one, and have them go on once somebody has continued this one.

    By SIGSTOP, because the kernel drops SIGTSTP in a session without a terminal, which each rank
    has.

    Args:
        find: Looks for those that stand still with this one.
    """
    if signal.getsignal(signal.SIGTSTP) == signal.SIG_IGN:  # so the caller wants it
        return
    stopped: Table = {}
    while new := {pid: one for pid, one in find().items() if pid not in stopped}:
        for process in new.values():
            send(process, signal.SIGSTOP)
        stopped |= new  # and what they had started meanwhile is found now
    _stop_here()
    for process in stopped.values():
        send(process, signal.SIGCONT)


def _stop_here() -> None:
    """Stop this process; nothing happens where no shell could continue it, as under ``ssh -t``."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
