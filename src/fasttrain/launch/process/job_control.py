"""The signals to a launcher: blocked, taken one by one, each with its sender."""

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
    """Block the signals of a supervised run, to be taken one by one; yield the mask before."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    # If the caller ignores SIGCHLD we inherit that, and the kernel would keep no exit status.
    reaping = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield blocked
    finally:
        signal.signal(signal.SIGCHLD, reaping)
        # Pending signals, such as our timer or a second SIGTERM, would end this process once they
        # are unblocked; its run has ended, but it still has a receipt to write.
        for signum in HELD & signal.sigpending():
            signal.sigwait({signum})
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def next_signal(limit_s: float) -> signal.struct_siginfo | None:
    """Wait up to `limit_s` for a signal, and return it.

    By a timer, because after a stop and a continue `signal.sigtimedwait` may return a result that
    it has never filled in, which can look like any signal.
    Source: CPython 3.11, Modules/signalmodule.c, signal_sigtimedwait_impl, ``if (timeout < 0)``.
    """
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, SHORTEST_S))
    info = signal.sigwaitinfo(HELD)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return None if info.si_signo == signal.SIGALRM else info


def reached_the_script(info: signal.struct_siginfo) -> bool:
    """True if the terminal has sent the script the same signal, which must not come twice.

    A terminal that goes away signals only the leader of its session, and the others once that has
    ended. Under ``ssh -t``, in a window of tmux or in a container, this process may be the leader.
    Source: Linux 6.12, drivers/tty/tty_jobctrl.c, tty_signal_session_leader.
    """
    leads = os.getsid(0) == os.getpid()
    return info.si_code == SI_KERNEL and not (leads and info.si_signo == signal.SIGHUP)


# ctrl-Z: the processes of a run stop with their launcher, and continue with it.


def stop_until_continued(find: Callable[[], Table]) -> None:
    """Stop processes and this one, and continue them once somebody has continued this one.

    By SIGSTOP, because the kernel drops SIGTSTP in a session without a terminal, such as each rank
    has.

    Args:
        find: Returns the processes that stop with this one.
    """
    if signal.getsignal(signal.SIGTSTP) == signal.SIG_IGN:  # the caller wants it ignored
        return
    stopped: Table = {}
    while new := {pid: one for pid, one in find().items() if pid not in stopped}:
        for process in new.values():
            send(process, signal.SIGSTOP)
        stopped |= new  # in the next round, what they had started meanwhile is found
    _stop_here()
    for process in stopped.values():
        send(process, signal.SIGCONT)


def _stop_here() -> None:
    """Stop this process; no-op where no shell could continue it, as under ``ssh -t``."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
