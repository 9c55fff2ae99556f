"""Starts the child of each attempt, passes signals on, waits for it, and leaves no orphans."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from fasttrain.launch.output.relay import Relay
from fasttrain.launch.process.procfs import Family, adopting
from fasttrain.launch.process.stop import (
    Stop,
    next_signal,
    reached_the_script,
    signals_held,
    stop_until_continued,
)
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.places import GUARDIAN_PROGRAM, RUN_MARK, program
from fasttrain.processes.agent_pipe import Handed
from fasttrain.processes.table import Ended, Process, end, name_of, named

# The guardian of a run: a process of its own that outlives a launcher that is killed.


STARTS = 4  # a guardian that keeps dying must not be started for ever
PROGRAM = program(GUARDIAN_PROGRAM)


class Guardian:
    """Ends the run when this process dies; see `fasttrain.processes.guardian`.

    Attributes:
        pid: Its number; 0 while there is none.
        failure: Why there is none; empty while there is one.
    """

    def __init__(
        self, run_id: str, environ: Mapping[str, str], spared: Iterable[Process] = ()
    ) -> None:
        self.pid = 0
        self.failure = ""
        self._starts_left = STARTS
        self._about = (run_id, *map(name_of, spared))
        # Without the run's mark, by which it finds what to end; Python may need the rest.
        self._environ = {name: value for name, value in environ.items() if name != RUN_MARK}
        self._read, self._write = os.pipe()
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        if not self._starts_left:
            self.pid, self.failure = 0, "its guardian ended again and again"
            return
        self._starts_left -= 1
        null = os.devnull
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                (sys.executable, "-IS", str(PROGRAM), *self._about),
                self._environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, self._read, 0),
                    # Whoever reads our output to its end must not have to wait for the guardian.
                    (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
                ],
                setsigmask=signal.valid_signals(),
            )
        except (OSError, ValueError) as error:
            self.pid = 0
            self.failure = getattr(error, "strerror", None) or str(error)

    def dismiss(self) -> None:
        """End it: there is nothing left that it should end."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._close()

    def act(self) -> None:
        """Have it end the run, as if this process had been killed."""
        self._close()

    def _close(self) -> None:
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        if self.pid:
            with suppress(ChildProcessError):  # reaped with the others
                os.waitpid(self.pid, 0)


@contextmanager
def guarded(environ: Mapping[str, str], spared: Iterable[Process]) -> Iterator[Guardian]:
    """Have a guardian during a run with this environment.

    It ends the run at an unexpected error, too. A `FasttrainError` means that nothing was started.

    Args:
        environ: The environment of the run.
        spared: Children of this process that are not of the run.
    """
    guardian = Guardian(environ.get(RUN_MARK, ""), environ, spared)
    try:
        yield guardian
    except FasttrainError:
        guardian.dismiss()
        raise
    except BaseException:
        guardian.act()
        raise
    guardian.dismiss()


# Starts the child of each attempt, passes signals on, waits for it, and leaves no orphans.


ENDED_LEFT = "ended what the script left running"

TICK_S = 0.25
# Helpers of multiprocessing and torch clean up and end when the script's end of a pipe closes.
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run.

    Attributes:
        exit_code: Exit code of the child, or 128 + signal; of a run that was made to end, 128 +
            the signal that asked for it.
        interrupted: Whether SIGINT ended it; a script that handles one may end with 130, too.
        warnings: What went wrong, one sentence each.
    """

    exit_code: int
    interrupted: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Child:
    """What is started.

    Attributes:
        program: Path of the program.
        argv: Its arguments, its own name first.
        environ: Its environment.
        relay: What carries its output.
        held: Signals that it starts with blocked, so that they don't end it before it handles them.
        handed: The end of a pipe that it is to get, if it is an agent; None for the script itself.
    """

    program: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    relay: Relay
    held: frozenset[int] = frozenset()
    handed: Handed | None = None

    @property
    def is_agent(self) -> bool:
        """True if it starts the script's ranks, each in a session that no terminal stops."""
        return self.handed is not None


class Again(Protocol):
    """Decides about further attempts."""

    def failed(self, exit_code: int) -> float | None:
        """Return the seconds after which to start the child again, or None for the end."""

    def asks(self) -> bool:
        """True if the child restarts its workers itself, and waits for the way to be cleared."""

    def clear(self) -> bool:
        """Put aside the records of the attempt, whose processes have ended; False if it can't."""

    def environ(self) -> Mapping[str, str]:
        """Return the environment of the child's next attempt."""


def supervise(child: Child, tick: Callable[[], None], stop: Stop, again: Again) -> End:
    """Run a program to its end, and end what it left running if it failed or was stopped.

    Signals are taken by sigwaitinfo, which shows who sent them: a ctrl-C reaches the script from
    the terminal itself and must not arrive twice.

    Raises:
        FasttrainError: The command can't be started.
    """
    family = Family()
    environ = child.environ
    with signals_held() as blocked, adopting(), guarded(environ, family.before) as guardian:
        pid = _spawn(child, environ, blocked)
        child.relay.start()
        watch = _Watch(pid, child, tick, stop, guardian, family)
        end = watch.to_the_end(again, lambda: _spawn(child, again.environ(), blocked))
        stop.ignore_more()
        return end


def _spawn(child: Child, environ: Mapping[str, str], mask: set[Any]) -> int:
    # Started from the main thread: the worker's parent-death signal is tied to that thread.
    try:
        return os.posix_spawn(
            child.program,
            child.argv,
            {**environ, **(child.handed.environ if child.handed else {})},
            file_actions=[
                *(
                    (os.POSIX_SPAWN_DUP2, end, descriptor)
                    for descriptor, end in child.relay.child_ends.items()
                ),
                *([(os.POSIX_SPAWN_DUP2, *child.handed)] if child.handed else []),
            ],
            setsigmask=mask | child.held,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them; a child must not
        )
    except (OSError, ValueError) as error:
        raise FasttrainError(
            f"{child.program} can't be started",
            why=getattr(error, "strerror", None) or str(error),
            fix="check that it is a program for this machine; a script needs a #! line",
            slug="cannot-start",
            exit_code=ExitCode.CANNOT_START,
        ) from error


class _Watch:
    """Supervises the child of a run, and those of further attempts."""

    def __init__(
        self,
        pid: int,
        child: Child,
        tick: Callable[[], None],
        stop: Stop,
        guardian: Guardian,
        family: Family,
    ) -> None:
        self._child = pid
        self._status: int | None = None
        self._relay, self._is_agent = child.relay, child.is_agent
        self._tick = tick
        self._stop = stop
        self._guardian, self._family = guardian, family
        self._told: list[str] = []

    def to_the_end(self, again: Again, start: Callable[[], int]) -> End:
        """Wait for the child and those of further attempts; end what they left running."""
        while True:
            code = self._wait(again)
            if code == 0 and not self._stop.signum:
                break  # what a good run left running, such as TensorBoard, is meant to stay
            going = self._status is not None and not self._stop.signum
            delay_s = again.failed(code) if going else None
            self._end_rest()
            if delay_s is None or not again.clear():
                break
            if not self._back_off(delay_s):
                code, self._status = self._stop.exit_code, None  # that of the attempt before
                break
            self._child, self._status = start(), None
        return End(code, self._was_interrupted(code), (*self._unguarded(), *self._told))

    def _wait(self, again: Again) -> int:
        """Return the child's exit code once it ends; clear the way when it restarts its workers."""
        cleared = True
        while self._status is None and not self._stop.due():
            self._listen(TICK_S)
            if self._status is None and cleared and again.asks():
                self._end_rest(self._child)
                cleared = again.clear()
                if not cleared:
                    os.kill(self._child, signal.SIGTERM)  # it would wait for the answer for ever
        return 128 + self._stop.signum if self._status is None else _exit_code(self._status)

    def _was_interrupted(self, code: int) -> bool:
        """True if SIGINT ended the run, also by being sent twice, and no exit of the script's."""
        if code != 128 + signal.SIGINT:
            return False
        if self._is_agent:
            return self._stop.signum == signal.SIGINT
        return self._status is None or not os.WIFEXITED(self._status)

    def _end_rest(self, *spared: int) -> None:
        """End what is left of an attempt; kill the child as well if it still runs."""
        killed = self._status is None and not spared
        ended = end(
            lambda: self._family.find(self._guardian.pid, *spared),
            0 if killed else self._stop.grace_s,
            settle_s=0 if killed else SETTLE_S,
            pause=self._pause,
        )
        if killed and self._status is None:
            os.kill(self._child, signal.SIGKILL)  # without /proc, nothing else has found it
        self._told += _told(ended, killed, self._stop)

    def _back_off(self, delay_s: float) -> bool:
        """Wait for `delay_s`; False as soon as somebody wants the run to end."""
        due_s, stop = time.monotonic() + delay_s, self._stop
        while not (stop.signum or stop.preempted) and (left_s := due_s - time.monotonic()) > 0:
            self._listen(min(left_s, TICK_S))
        return not (stop.signum or stop.preempted)

    def _listen(self, limit_s: float) -> None:
        """Wait up to `limit_s` for a signal, and handle it."""
        self._reap()
        info = next_signal(limit_s)
        if info is None:
            self._tick()
        elif info.si_signo == signal.SIGWINCH:
            self._relay.resize()
        elif info.si_signo == signal.SIGTSTP:
            self._stop_with_ranks(info)
        elif info.si_signo != signal.SIGCHLD:
            self._stop.hear(info.si_signo)
            if not reached_the_script(info) and self._status is None:
                os.kill(self._child, self._stop.passed_on(info.si_signo, info.si_pid))
        self._reap()

    def _stop_with_ranks(self, info: signal.struct_siginfo) -> None:
        """Stop with all ranks; a single script was stopped by the terminal already."""
        if self._is_agent:
            stop_until_continued(lambda: self._family.find(self._guardian.pid))
            return
        if not reached_the_script(info) and self._status is None:
            os.kill(self._child, signal.SIGTSTP)
        stop_until_continued(dict)

    def _pause(self, limit_s: float) -> bool:
        self._listen(limit_s)
        return self._stop.now

    def _reap(self) -> None:
        """Reap all children that have ended, including adopted ones."""
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


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _told(ended: Ended, killed: bool, stop: Stop) -> Iterator[str]:
    if killed:
        name = signal.Signals(stop.signum).name
        when = "at the second ctrl-C" if stop.now else f"{stop.grace_s:g} s after {name}"
        # Empty where the terminal's second SIGINT has ended torchrun's agent, and it its workers.
        hard = f", and killed: {named(ended.killed)}" if ended.killed else ""
        yield f"still running {when}{hard}"
    elif ended.ended:
        yield f"{ENDED_LEFT}: {named(ended.ended)}"
    if ended.left:
        yield f"could not end {named(ended.left)}"
