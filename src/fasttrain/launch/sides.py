"""Starts several runs of one script beside each other, each in a launcher of its own.

A launcher is a fork of this process, in a process group of its own: a terminal's ctrl-C reaches
this process alone, which passes it on. If this process is killed, the kernel tells the launchers,
and they end their runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from fasttrain.model.codec import CodecError, dumps, loads
from fasttrain.model.errors import ExitCode
from fasttrain.model.proof import Side, Took, Turn
from fasttrain.processes.handover import HIGH_DESCRIPTOR

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_S = 0.25
END_S = 60.0  # for a script that goes on although it is told to end
MOST_ASKED = 3  # times that a launcher is asked to end; where SIGTERM is ignored, all are in vain
LONGEST_TURN_S = 3600.0  # a hang that nobody sees must not keep the others waiting for ever
Run = Callable[[Side], int]


class Sides:
    """Runs that take turns.

    Args:
        run: Starts the run of a side, waits for its end, and returns its exit code. Called in a
            process of its own.
        tick: Called a few times a second.
        until_s: By `time.monotonic`: no turn is waited for any longer.
        end_s: Seconds for a script to end after it was told to, before it is made to; as long as
            there is time, it has `END_S`.

    Attributes:
        signum: The signal that asked for the end; 0 while none did.
        given_up: Whether `give_up` was called.
    """

    def __init__(
        self,
        run: Run,
        tick: Callable[[], None] = lambda: None,
        *,
        until_s: float = math.inf,
        end_s: float = END_S,
    ) -> None:
        self.signum = 0
        self.given_up = False
        self._run, self._tick = run, tick
        self._until_s, self._end_s = until_s, end_s
        self._ends: dict[Side, tuple[socket.socket, int]] = {}
        self._running: dict[Side, _Running] = {}

    def prepare(self, sides: Sequence[Side]) -> dict[Side, int]:
        """Make a socket for each side; return the descriptors of the workers' ends."""
        for side in sides:
            ours, theirs = socket.socketpair()
            high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
            theirs.close()
            self._ends[side] = ours, high
        return {side: end for side, (_, end) in self._ends.items()}

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Pass signals on in the block, and end at its end what still runs."""
        before = {signum: signal.signal(signum, self._pass_on) for signum in _heeded()}
        try:
            yield
        finally:
            self._end_all(Turn(0, over=True))
            self._close()
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def start(self, *sides: Side) -> None:
        """Start sides before their first turns."""
        for side in sides:
            self._start(side)

    def take(self, side: Side, turn: Turn) -> Took | None:
        """Have a side take its turn; None if it has ended without a word, or it is too late."""
        if self.given_up:
            return None
        running = self._running.get(side) or self._start(side)
        running.send(turn)
        until_s = time.monotonic() + LONGEST_TURN_S
        while not (self.signum or self.given_up) and time.monotonic() < self._until_s:
            ended = running.has_ended()
            if (took := running.took(0.0 if ended else TICK_S)) is not None:
                return took
            if ended:
                return None
            self._tick()
            if time.monotonic() > until_s:
                running.signal(signal.SIGTERM)
        return None

    def give_up(self) -> None:
        """Have no side take a turn any more, and make all end, which is no failure of theirs."""
        if not self.given_up:
            self.given_up = True
            for running in self._running.values():
                running.make_end()

    def end(self, *sides: Side) -> None:
        """Stop sides, and wait for their end."""
        self._end_all(Turn(0, over=True), sides)

    def exit_code(self, side: Side) -> int | None:
        """Return the exit code of a side; None if it hasn't ended, or hasn't begun."""
        running = self._running.get(side)
        return None if running is None else running.exit_code

    def _start(self, side: Side) -> _Running:
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        pid = os.fork()
        if not pid:
            _in_fork(lambda: self._in_launcher(side, launcher))
        ours, theirs = self._ends[side]
        os.close(theirs)
        self._running[side] = running = _Running(pid, ours)
        return running

    def _in_launcher(self, side: Side, launcher: int) -> int:
        os.setpgid(0, 0)
        for signum in _heeded():
            interrupts = signum == signal.SIGINT
            signal.signal(signum, signal.default_int_handler if interrupts else signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:
            return 0
        for other, (ours, theirs) in self._ends.items():
            ours.close()
            if other == side:
                os.set_inheritable(theirs, True)  # noqa: FBT003 - no keyword
            elif other not in self._running:  # else it is closed already
                os.close(theirs)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        return self._run(side)

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        self.signum = self.signum or signum
        for running in self._running.values():
            running.signal(signum)

    def _end_all(self, turn: Turn, sides: Sequence[Side] = ()) -> None:
        ended = [self._running[side] for side in sides or self._running if side in self._running]
        for running in ended:
            running.send(turn)
        now_s = time.monotonic()
        until_s = max(now_s + self._end_s, min(now_s + END_S, self._until_s))
        while not all(running.has_ended() for running in ended):
            self._tick()
            time.sleep(TICK_S / 5)
            if time.monotonic() > until_s:
                until_s += self._end_s
                for running in ended:
                    running.make_end()

    def _close(self) -> None:
        for side, (ours, theirs) in self._ends.items():
            ours.close()
            if side not in self._running:  # else it was closed at its start
                os.close(theirs)
        self._ends.clear()


class _Running:
    """One launcher, as a child of this process."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.exit_code: int | None = None
        self._asked = 0
        self._pid, self._socket = pid, end
        self._left = b""

    def send(self, turn: Turn) -> None:
        with suppress(OSError):  # it has ended
            self._socket.sendall(dumps(turn, indent=None).encode() + b"\n")

    def took(self, limit_s: float) -> Took | None:
        """Return what it did, if it says so within so many seconds."""
        while b"\n" not in self._left:
            if not select.select([self._socket], [], [], limit_s)[0]:
                return None
            read = b""
            with suppress(OSError):
                read = self._socket.recv(1 << 16)
            if not read:
                time.sleep(limit_s)  # until its launcher has ended, too
                return None
            self._left += read
        line, _, self._left = self._left.partition(b"\n")
        try:
            return loads(Took, line)
        except CodecError:  # of the script, which has found the descriptor
            return None

    def has_ended(self) -> bool:
        """True if it has ended; its exit code is known then."""
        if self.exit_code is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = 0 if self._asked else code if code >= 0 else 128 - code
        return self.exit_code is not None

    def make_end(self) -> None:
        """End it; that is no failure. A launcher that is killed has its guardian end the run."""
        self._asked += 1
        self.signal(signal.SIGTERM if self._asked <= MOST_ASKED else signal.SIGKILL)

    def signal(self, signum: int) -> None:
        if self.exit_code is None:  # not reaped, so that its number is still its own
            os.kill(self._pid, signum)


def _heeded() -> list[signal.Signals]:
    """Return the signals that ask for the end, without those that the caller ignores (nohup)."""
    return [it for it in _STOPPING if signal.getsignal(it) != signal.SIG_IGN]


def _in_fork(act: Callable[[], int]) -> None:
    """End this process, which was forked, with what a function returns."""
    code = int(ExitCode.BUG)
    try:
        code = act()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code & 0xFF)
