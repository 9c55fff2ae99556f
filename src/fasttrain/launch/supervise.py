"""Starts the one child of a run, passes signals on to it, and waits for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from fasttrain.launch.relay import Relay
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
TICK_S = 0.25
SI_KERNEL = 0x80  # asm-generic/siginfo.h: the terminal, which signals the script as well


def supervise(
    program: str,
    argv: tuple[str, ...],
    environ: Mapping[str, str],
    relay: Relay,
    tick: Callable[[], int | None],
) -> int:
    """Run a program to its end and give its exit code, or 128 + signal.

    Signals are taken by waiting for them, because only then the kernel tells who sent one: a
    ctrl-C reaches the script from the terminal itself and must not arrive twice. ``tick`` is called
    every `TICK_S` and may give a signal for the program.

    Raises:
        FasttrainError: The command can't be started.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    # A caller that ignores SIGCHLD passes this on, and the kernel then keeps no exit status.
    reaping = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        child = _spawn(program, argv, environ, relay, blocked)
        relay.start()
        status = _wait(child, relay, tick)
    finally:
        signal.signal(signal.SIGCHLD, reaping)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


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


def _wait(child: int, relay: Relay, tick: Callable[[], int | None]) -> int:
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        info = signal.sigtimedwait(WATCHED, TICK_S)
        # Behind a stop and a continue, CPython may give a result that it never filled in.
        # Source: Modules/signalmodule.c of 3.11, signal_sigtimedwait_impl, `if (timeout < 0) break`
        if info is None or info.si_signo not in WATCHED:
            if signum := tick():
                os.kill(child, signum)
        elif info.si_signo == signal.SIGWINCH:
            relay.resize()
        elif info.si_signo != signal.SIGCHLD and info.si_code != SI_KERNEL:
            os.kill(child, info.si_signo)
