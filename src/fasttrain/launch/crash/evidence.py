"""All that is known of one rank's end, as the rules of the table of causes ask for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fasttrain.launch.crash.log_tail import LAST_WORDS, before_traceback, last_lines, read_traceback
from fasttrain.model.crash import Frame, Raised, Surroundings
from fasttrain.model.plan import LaunchPlan

# Wrappers whose message holds the traceback of another process.
_WRAPPERS = re.compile(r"Original Traceback|terminated with the following error:")
# Source: torch 2.13, torch/utils/data/dataloader.py, _try_get_data
_LOADER_ENDED = re.compile(r"^DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly$")

# Of one that printed its traceback itself. Source: torch 2.13, torch/multiprocessing/spawn.py, join
_CHILD_FAILED = re.compile(r"^process \d+ terminated with exit code 1$")
# Of one that could not begin: what it can't import, say. Its traceback is in the log alone.
# Source: torch 2.13, torch/utils/data/_utils/signal_handling.py
_LOADER_FAILED = re.compile(
    r"^DataLoader worker \(pid \d+\) exited unexpectedly with exit code 1\b"
)
# Where the traceback of a process that multiprocessing started begins.
_BEGINS_A_CHILD = re.compile(r"[/\\]multiprocessing[/\\](?:spawn|forkserver|process)\.py$")
# Characters of a line that are searched: patterns take time by the square of a word's length.
SEARCHED_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class Case:
    """All that is known of one rank's end.

    Attributes:
        exit_code: Its exit code, or minus the signal that it died of.
        raised: Its exception, followed by those that led to it; empty without one.
        handled: Whether the exception was only being handled when another one ended it.
        cwd: Its working directory when it raised; empty where that isn't known.
        log: The end of its log.
        stack: The stack that a fatal signal left.
        plan: The plan with its secrets masked.
        before: The machine before the run.
        after: The machine behind it.
        peak_bytes: The most memory that a process of the run had, in bytes.
    """

    exit_code: int
    raised: tuple[Raised, ...] = ()
    handled: bool = False
    cwd: str = ""
    log: str = ""
    stack: tuple[Frame, ...] = ()
    plan: LaunchPlan | None = None
    before: Surroundings = field(default_factory=Surroundings)
    after: Surroundings = field(default_factory=Surroundings)
    peak_bytes: int = 0

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
        """What there is to search: its message, or what C++ said before it called abort().

        Of a line that is longer than any message, its two ends.
        """
        if self.raised:
            return "\n".join(map(_ends, self.raised[0].message.split("\n")))
        return "\n".join(last_lines(self.log, LAST_WORDS)) if self.signal == "SIGABRT" else ""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The calls that led to its end."""
        return self.raised[0].frames if self.raised else self.stack

    def telling(self) -> Case:
        """Return the case of the exception that tells most: not what only passes another one on."""
        return next(self.each())

    def each(self) -> Iterator[Case]:
        """Yield a case for each exception, the telling one first, or this one without any."""
        chain = _in_their_process(self.raised)
        told = [inner for raised in chain for inner in self._unwrapped(raised)]
        while len(told) > 1 and _passes_on(told[0]):
            told = told[1:]
        handled = False
        for index, raised in enumerate(told):
            handled = handled or (raised.handled and index > 0)
            # One that was caught inside of a library has no call of the user's in its traceback.
            own = any(frame.own for frame in raised.frames)
            frames = raised.frames if own else self.raised[0].frames
            yield replace(self, raised=(replace(raised, frames=frames),), handled=handled)
        if not told:
            yield self

    def _unwrapped(self, raised: Raised) -> Iterator[Raised]:
        """Yield the exception of another process in front of the one that passes it on."""
        inner = None
        if _WRAPPERS.search(raised.message):
            inner = read_traceback(raised.message)
        elif _CHILD_FAILED.search(raised.message):
            inner = read_traceback(self.log)
            if inner and inner.message == raised.message:  # its own, printed last
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
    """Return whether it only says that something ended, and what led to it says why."""
    by_itself = raised.name == "SystemExit"  # `except Exception: ...; sys.exit(1)`
    of_parts = "builtins.BaseExceptionGroup" in raised.kinds  # which are recorded behind it
    return by_itself or of_parts or bool(_LOADER_ENDED.search(raised.message))


def _in_their_process(chain: tuple[Raised, ...]) -> Iterator[Raised]:
    """Yield exceptions with the calls of the process that raised them, a pool's worker say.

    Source: CPython 3.11, Lib/multiprocessing/pool.py and Lib/concurrent/futures/process.py: the
    cause of an exception that a worker passed on is a RemoteTraceback, whose text is the worker's.
    """
    for raised, cause in zip(chain, (*chain[1:], None), strict=False):
        if not _is_remote(raised):
            there = read_traceback(cause.message) if cause and _is_remote(cause) else None
            yield replace(raised, frames=there.frames) if there else raised


def _is_remote(raised: Raised) -> bool:
    return raised.name.lstrip("_") == "RemoteTraceback"
