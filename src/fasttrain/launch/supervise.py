"""Starts the one child of a run, passes signals on to it, waits for it, and leaves no orphan."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fasttrain.launch.family import Family, adopting
from fasttrain.launch.guard import Guardian, guarded
from fasttrain.launch.relay import Relay
from fasttrain.launch.stop import Stop
from fasttrain.processes.ending import Ended, end, named
from fasttrain.spec.errors import ExitCode, FasttrainError

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
WATCHED = {*FORWARDED, signal.SIGCHLD, signal.SIGWINCH}
HELD = {*WATCHED, signal.SIGALRM}  # our own timer
TICK_S = 0.25
SHORTEST_S = 0.001  # a timer of 0 never comes
SI_KERNEL = 0x80  # asm-generic/siginfo.h: the terminal, which signals the script as well
# Helpers of multiprocessing and torch end, and clean up, when the script's end of a pipe closes.
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run.

    Attributes:
        exit_code: Exit code of the child, or 128 + signal; of a run that was made to end, 128 +
            the signal that asked for it.
        warnings: What was not as it should be, one sentence each.
    """

    exit_code: int
    warnings: tuple[str, ...] = ()


def supervise(
    program: str,
    argv: tuple[str, ...],
    environ: Mapping[str, str],
    relay: Relay,
    tick: Callable[[], None],
    stop: Stop,
) -> End:
    """Run a program to its end, and end what it leaves behind if it failed or was stopped.

    Signals are taken by waiting for them, because only then the kernel tells who sent one: a
    ctrl-C reaches the script from the terminal itself and must not arrive twice.

    Raises:
        FasttrainError: The command can't be started.
    """
    family = Family()
    with _signals_held() as blocked, adopting(), guarded(environ) as guardian:
        child = _spawn(program, argv, environ, relay, blocked)
        relay.start()
        return _Watch(child, relay, tick, stop, guardian).to_the_end(family)


@contextmanager
def _signals_held() -> Iterator[set[Any]]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    # A caller that ignores SIGCHLD passes this on, and the kernel then keeps no exit status.
    reaping = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield blocked
    finally:
        signal.signal(signal.SIGCHLD, reaping)
        if signal.SIGALRM in signal.sigpending():
            signal.sigwait({signal.SIGALRM})  # it would end us once it isn't held back any more
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _spawn(
    program: str, argv: tuple[str, ...], environ: Mapping[str, str], relay: Relay, mask: set[Any]
) -> int:
    # Started from the main thread: the worker's parent-death signal is tied to that thread.
    try:
        return os.posix_spawn(
            program,
            argv,
            environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, end, descriptor)
                for descriptor, end in relay.child_ends.items()
            ],
            setsigmask=mask,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them; a child must not
        )
    except (OSError, ValueError) as error:
        raise FasttrainError(
            f"{program} can't be started",
            why=getattr(error, "strerror", None) or str(error),
            fix="check that it is a program for this machine; a script needs a #! line",
            slug="cannot-start",
            exit_code=ExitCode.CANNOT_START,
        ) from error


class _Watch:
    """Stays with the child of a run."""

    def __init__(
        self, child: int, relay: Relay, tick: Callable[[], None], stop: Stop, guardian: Guardian
    ) -> None:
        self._child = child
        self._status: int | None = None
        self._relay = relay
        self._tick = tick
        self._stop = stop
        self._guardian = guardian

    def to_the_end(self, family: Family) -> End:
        """Wait for the child, end what it leaves behind unless that is meant to stay."""
        while self._status is None and not self._stop.due():
            self._listen(TICK_S)
        killed = self._status is None
        code = 128 + self._stop.signum if killed else _exit_code(self._status or 0)
        if code == 0 and not self._stop.signum:
            return End(0, tuple(self._unguarded()))  # what it left running is meant to run on
        ended = end(
            lambda: family.find(spared=self._guardian.pid),
            0 if killed else self._stop.grace_s,
            settle_s=0 if killed else SETTLE_S,
            pause=self._pause,
        )
        if self._status is None:
            os.kill(self._child, signal.SIGKILL)  # where there is no /proc to find it in
        return End(code, (*self._unguarded(), *_told(ended, killed, self._stop)))

    def _listen(self, limit_s: float) -> None:
        """Wait so long for a signal at most, and do what it asks for."""
        self._reap()
        info = _next_signal(limit_s)
        if info is None:
            self._tick()
        elif info.si_signo == signal.SIGWINCH:
            self._relay.resize()
        elif info.si_signo != signal.SIGCHLD:
            self._stop.hear(info.si_signo)
            if info.si_code != SI_KERNEL and self._status is None:
                os.kill(self._child, info.si_signo)
        self._reap()

    def _pause(self, limit_s: float) -> bool:
        self._listen(limit_s)
        return self._stop.now

    def _reap(self) -> None:
        """Take all that ended off the kernel's list, those that were adopted included."""
        with suppress(ChildProcessError):
            while True:
                ended, status = os.waitpid(-1, os.WNOHANG)
                if not ended:
                    return
                if ended == self._child:
                    self._status = status
                elif ended == self._guardian.pid:
                    self._guardian.start()

    def _unguarded(self) -> Iterator[str]:
        if self._guardian.failure:
            yield (
                "nothing would have ended this run if its launcher had been killed: "
                f"{self._guardian.failure}"
            )


def _next_signal(limit_s: float) -> signal.struct_siginfo | None:
    """Wait so long for a signal, and give it.

    By a timer, because behind a stop and a continue `signal.sigtimedwait` may give a result that it
    has never filled in, and any signal may seem to be in it.
    Source: CPython 3.11, Modules/signalmodule.c, signal_sigtimedwait_impl, ``if (timeout < 0)``.
    """
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, SHORTEST_S))
    info = signal.sigwaitinfo(HELD)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return None if info.si_signo == signal.SIGALRM else info


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _told(ended: Ended, killed: bool, stop: Stop) -> Iterator[str]:
    if killed:
        name = signal.Signals(stop.signum).name
        when = "at the second ctrl-C" if stop.now else f"{stop.grace_s:g} s after {name}"
        # None where the terminal's second SIGINT ended torchrun's agent, and it its workers, first.
        hard = f", and killed: {named(ended.killed)}" if ended.killed else ""
        yield f"still running {when}{hard}"
    elif ended.ended:
        yield f"ended what the script left running: {named(ended.ended)}"
    if ended.left:
        yield f"could not end {named(ended.left)}"
