"""What is known of one rank's end: the only input of the rules in the table of causes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fasttrain.launch.crash.log_tail import LAST_LINES, before_traceback, last_lines, read_traceback
from fasttrain.model.crash import Failure, Frame, Raised, Surroundings, WorkerExit
from fasttrain.model.plan import LaunchPlan

# Exceptions whose message holds the traceback of another process.
_WRAPPERS = re.compile(r"Original Traceback|terminated with the following error:")
# Source: torch 2.13, torch/utils/data/dataloader.py, _try_get_data
_LOADER_ENDED = re.compile(r"^DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly$")

# A child that printed its traceback itself.
# Source: torch 2.13, torch/multiprocessing/spawn.py, join
_CHILD_FAILED = re.compile(r"^process \d+ terminated with exit code 1$")
# A child that could not start, because of a failed import say. Its traceback is only in the log.
# Source: torch 2.13, torch/utils/data/_utils/signal_handling.py
_LOADER_FAILED = re.compile(
    r"^DataLoader worker \(pid \d+\) exited unexpectedly with exit code 1\b"
)
# Where the traceback of a process that multiprocessing started begins.
_BEGINS_A_CHILD = re.compile(r"[/\\]multiprocessing[/\\](?:spawn|forkserver|process)\.py$")
# Characters of a line that are searched: some patterns take time quadratic in a word's length.
SEARCHED_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one rank's end.

    Attributes:
        exit_code: Its exit code, or minus the signal that it died of.
        raised: Its exception, followed by those that led to it; empty without one.
        handled: Whether the exception was only being handled when another one ended the rank.
        log: The end of its log.
        stack: The Python stack that a fatal signal left.
        plan: The plan with its secrets masked.
        before: The machine before the run.
        after: The machine after it.
        peak_bytes: The highest memory use of any process of the run, in bytes.
        exit: How the process that started it saw it end.
        failure: What the worker itself recorded; None if it could not record anything.
    """

    exit_code: int
    raised: tuple[Raised, ...] = ()
    handled: bool = False
    log: str = ""
    stack: tuple[Frame, ...] = ()
    plan: LaunchPlan | None = None
    before: Surroundings = field(default_factory=Surroundings)
    after: Surroundings = field(default_factory=Surroundings)
    peak_bytes: int = 0
    exit: WorkerExit = field(default_factory=lambda: WorkerExit(0, 0, 0, 0, 0))
    failure: Failure | None = None

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.exit.rank

    @property
    def time_ns(self) -> int:
        """When it failed, or else when its end was seen, in nanoseconds since the epoch."""
        return self.failure.time_ns if self.failure else self.exit.time_ns

    @property
    def order_ns(self) -> int:
        """The same by the monotonic clock: setting the time of day must not change the order."""
        return self.failure.monotonic_ns if self.failure else self.exit.monotonic_ns

    @property
    def cwd(self) -> str:
        """Its working directory when it raised; empty where that isn't known."""
        return self.failure.cwd if self.failure else ""

    @property
    def signal(self) -> str:
        """Name of the signal that it died of; empty for an exit code."""
        if self.exit_code >= 0:
            return ""
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:  # a real-time one
            return f"signal {-self.exit_code}"

    @property
    def text(self) -> str:
        """The text that rules search: its message, or what C++ printed before it called abort().

        Of a line longer than any message, only the two ends are kept.
        """
        if self.raised:
            return "\n".join(map(_ends, self.raised[0].message.split("\n")))
        return "\n".join(last_lines(self.log, LAST_LINES)) if self.signal == "SIGABRT" else ""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The calls that led to its end."""
        return self.raised[0].frames if self.raised else self.stack

    def telling(self) -> Evidence:
        """Return the evidence of the most telling exception: not of one that passes another on."""
        return next(self.each())

    def each(self) -> Iterator[Evidence]:
        """Yield the evidence for each exception, the most telling first; itself without any."""
        chain = _in_their_process(self.raised)
        told = [inner for raised in chain for inner in self._unwrapped(raised)]
        while len(told) > 1 and _passes_on(told[0]):
            told = told[1:]
        handled = False
        for index, raised in enumerate(told):
            handled = handled or (raised.handled and index > 0)
            # An exception caught inside a library has none of the user's calls in its traceback.
            own = any(frame.own for frame in raised.frames)
            frames = raised.frames if own else self.raised[0].frames
            yield replace(self, raised=(replace(raised, frames=frames),), handled=handled)
        if not told:
            yield self

    def _unwrapped(self, raised: Raised) -> Iterator[Raised]:
        """Yield the exception of another process before the one that passes it on."""
        inner = None
        if _WRAPPERS.search(raised.message):
            inner = read_traceback(raised.message)
        elif _CHILD_FAILED.search(raised.message):
            inner = read_traceback(self.log)
            if inner and inner.message == raised.message:  # the parent's own, printed last
                inner = read_traceback(before_traceback(self.log))
        elif _LOADER_FAILED.search(raised.message):
            inner = self._of_a_child(read_traceback(self.log))
            inner = inner or self._of_a_child(read_traceback(before_traceback(self.log)))
        if inner:
            yield replace(inner, handled=raised.handled)
            raised = replace(raised, handled=False)
        yield raised

    @staticmethod
    def _of_a_child(raised: Raised | None) -> Raised | None:
        """Return an exception if it ended a process that multiprocessing had started."""
        frames = raised.frames if raised else ()
        return raised if any(_BEGINS_A_CHILD.search(frame.file) for frame in frames) else None

    def place(self) -> str:
        """Return ``file:line`` of the innermost call in the user's code, or where it is known."""
        own = [frame for frame in self.frames if frame.own] or list(self.frames)
        return f"{Path(own[-1].file).name}:{own[-1].line}" if own else "the last line of its log"


def _ends(line: str) -> str:
    if len(line) <= SEARCHED_LENGTH:
        return line
    half = SEARCHED_LENGTH // 2
    return f"{line[:half]} ... {line[-half:]}"


def _passes_on(raised: Raised) -> bool:
    """True if it only says that something ended; the exception that led to it says why."""
    by_itself = raised.name == "SystemExit"  # `except Exception: ...; sys.exit(1)`
    of_parts = "builtins.BaseExceptionGroup" in raised.kinds  # which are recorded after it
    return by_itself or of_parts or bool(_LOADER_ENDED.search(raised.message))


def _in_their_process(chain: tuple[Raised, ...]) -> Iterator[Raised]:
    """Yield exceptions with the calls of the process that raised them, such as a pool's worker.

    Source: CPython 3.11, Lib/multiprocessing/pool.py and Lib/concurrent/futures/process.py: the
    cause of an exception that a worker passed on is a RemoteTraceback, whose text is the worker's.
    """
    for raised, cause in zip(chain, (*chain[1:], None), strict=False):
        if not _is_remote(raised):
            there = read_traceback(cause.message) if cause and _is_remote(cause) else None
            yield replace(raised, frames=there.frames) if there else raised


def _is_remote(raised: Raised) -> bool:
    return raised.name.lstrip("_") == "RemoteTraceback"
