"""The signals to a launcher: held back, taken one by one, and where each has come from."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fasttrain.processes.table import Table, send

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
WATCHED = {*FORWARDED, signal.SIGCHLD, signal.SIGWINCH, signal.SIGTSTP}
HELD = {*WATCHED, signal.SIGALRM}  # our own timer
SHORTEST_S = 0.001  # a timer of 0 never comes
SI_KERNEL = 0x80  # asm-generic/siginfo.h: the terminal


@contextmanager
def signals_held() -> Iterator[set[Any]]:
    """Hold the signals of a supervised run back, to be taken one by one; give what was before."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    # A caller that ignores SIGCHLD passes this on, and the kernel then keeps no exit status.
    reaping = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield blocked
    finally:
        signal.signal(signal.SIGCHLD, reaping)
        # Our timer, or a second SIGTERM: once they aren't held back any more they would end this
        # process, whose run has ended already and which has a receipt to write.
        for signum in HELD & signal.sigpending():
            signal.sigwait({signum})
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def next_signal(limit_s: float) -> signal.struct_siginfo | None:
    """Wait so long for a signal, and give it.

    By a timer, because behind a stop and a continue `signal.sigtimedwait` may give a result that it
    has never filled in, and any signal may seem to be in it.
    Source: CPython 3.11, Modules/signalmodule.c, signal_sigtimedwait_impl, ``if (timeout < 0)``.
    """
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, SHORTEST_S))
    info = signal.sigwaitinfo(HELD)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return None if info.si_signo == signal.SIGALRM else info


def reached_the_script(info: signal.struct_siginfo) -> bool:
    """Return whether the terminal has sent the script the same signal, which must not come twice.

    When it goes away, it tells the leader of its session alone, and the others once that has ended:
    under ``ssh -t``, in a window of tmux or in a container, this process may be the leader.
    Source: Linux 6.12, drivers/tty/tty_jobctrl.c, tty_signal_session_leader.
    """
    leads = os.getsid(0) == os.getpid()
    return info.si_code == SI_KERNEL and not (leads and info.si_signo == signal.SIGHUP)


# ctrl-Z: what a run has started stands still with its launcher, and goes on with it.


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
