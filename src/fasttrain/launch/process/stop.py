"""How a run ends that somebody asked to end: with time to save, but not for ever."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fasttrain.model.errors import ExitCode
from fasttrain.processes.table import Table, send

# The signals to a launcher: blocked, taken one by one, each with its sender.


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


# How a run ends that somebody asked to end: with time to save, but not for ever.


INTERRUPTED = "Interrupted"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.5  # `timeout` and others send one signal to a process and to its group
REMIND_S = 1.0  # most scripts have ended by then, and no message is needed
GOES_ON_S = 30.0  # after a ctrl-C that it has handled: the next one is its own again


@contextmanager
def heard_again() -> Iterator[None]:
    """Heed after the block what a run in it that was asked to end has left ignored.

    For whoever goes on to another run: it would hear no signal, and its script would inherit that.
    """
    before = {signum: signal.getsignal(signum) for signum in STOPPING}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Stop:
    """The end of a run as asked for by signals.

    Attributes:
        signum: The first signal that asked for it; 0 while none did, and once a script goes on that
            has handled ctrl-C.
        now: Whether a second ctrl-C asked for it at once.
        preempted: Whether the run was asked to end after a snapshot.

    Args:
        grace_s: Seconds that the run has to end in.
        tell: Prints a message to the user.
        heard: Called with each signal to this process.
        save: Signal at which the run saves a snapshot and ends, sent instead of SIGTERM; 0 without.
        may_go_on: Whether ctrl-C sets no limit, because a script may stop training at it, and
            evaluate what it has trained; torchrun's agent ends its ranks at any of these signals.
    """

    def __init__(
        self,
        grace_s: float,
        tell: Callable[[str], None],
        heard: Callable[[int], None] = lambda _signum: None,
        save: int = 0,
        *,
        may_go_on: bool = False,
    ) -> None:
        self.signum = 0
        self.now = self.preempted = False
        self.grace_s = grace_s
        self._tell = tell
        self._heard = heard
        self._save = save
        self._may_go_on = may_go_on
        self._since_s = 0.0
        self._kill_s = math.inf
        self._reminded = False

    def hear(self, signum: int) -> None:
        """Note a signal to this process."""
        self._heard(signum)
        self.preempted |= bool(self._save) and signum in (self._save, signal.SIGTERM)
        # A signal that the caller ignores, as under nohup, is ignored by the script as well.
        if signum not in STOPPING or signal.getsignal(signum) == signal.SIG_IGN:
            return
        now_s = time.monotonic()
        if not (signum == signal.SIGINT and self._may_go_on):
            self._kill_s = min(self._kill_s, now_s + self.grace_s)
        if not self.signum:
            self.signum, self._since_s = signum, now_s
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
            self._tell(self._reminder())
        if self._kill_s == math.inf and age_s >= GOES_ON_S and not self.now:
            self.signum, self._reminded = 0, False
        return self.now or time.monotonic() >= self._kill_s

    def ignore_more(self) -> None:
        """Have this process ignore further signals of the kind, if the run was asked to end.

        It has, and its receipt is written now: the second SIGTERM may come seconds after the first.
        """
        for signum in STOPPING if self.signum else ():
            signal.signal(signum, signal.SIG_IGN)  # Python resets handlers before it ends

    def _reminder(self) -> str:
        name = signal.Signals(self.signum).name
        ended = INTERRUPTED if self.signum == signal.SIGINT else name
        if self._kill_s == math.inf:
            return f"{ended}. The script goes on; ctrl-C again within {GOES_ON_S:g} s ends it now."
        return (
            f"{ended}. Waiting up to {self.grace_s:g} s for the script to save;"
            " ctrl-C again ends it now."
        )

    def _age_s(self) -> float:
        return time.monotonic() - self._since_s
