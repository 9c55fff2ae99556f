"""All that is known of one rank's end, as the rules of the table of causes ask for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fasttrain.launch.last_words import last_lines, read_traceback
from fasttrain.spec.crash import Frame, Raised, Surroundings
from fasttrain.spec.plan import LaunchPlan

LAST_WORDS = 60  # lines: a C++ stack stands behind the error itself
# Wrappers whose message holds the traceback of another process.
_WRAPPERS = re.compile(r"Original Traceback|terminated with the following error:")
# Source: torch 2.13, torch/utils/data/dataloader.py, _try_get_data
_LOADER_ENDED = re.compile(r"^DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly$")


@dataclass(frozen=True, slots=True)
class Case:
    """All that is known of one rank's end.

    Attributes:
        exit_code: Its exit code, or minus the signal that it died of.
        raised: Its exception, followed by those that led to it; empty without one.
        log: The end of its log.
        stack: The stack that a fatal signal left.
        plan: The plan with its secrets masked.
        before: The machine before the run.
        after: The machine behind it.
        peak_bytes: The most memory that a process of the run had, in bytes.
    """

    exit_code: int
    raised: tuple[Raised, ...] = ()
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
        """What there is to search: its message, or what C++ said before it called abort()."""
        if self.raised:
            return self.raised[0].message
        return "\n".join(last_lines(self.log, LAST_WORDS)) if self.signal == "SIGABRT" else ""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The calls that led to its end."""
        return self.raised[0].frames if self.raised else self.stack

    def telling(self) -> Case:
        """Give the case of the exception that tells most: not what only passes another one on."""
        return next(self.each())

    def each(self) -> Iterator[Case]:
        """Give a case for each exception, the telling one first, or this one without any."""
        told = [inner for raised in self.raised for inner in _unwrapped(raised)]
        while len(told) > 1 and _passes_on(told[0]):
            told = told[1:]
        for raised in told:
            # One that was caught inside of a library has no call of the user's in its traceback.
            own = any(frame.own for frame in raised.frames)
            frames = raised.frames if own else self.raised[0].frames
            yield replace(self, raised=(replace(raised, frames=frames),))
        if not told:
            yield self

    def place(self) -> str:
        """Give ``file:line`` of the innermost call in the user's code, or where it is known."""
        own = [frame for frame in self.frames if frame.own] or list(self.frames)
        return f"{Path(own[-1].file).name}:{own[-1].line}" if own else "the last line of its log"


def _passes_on(raised: Raised) -> bool:
    """Whether it only says that something ended, and what led to it says why."""
    by_itself = raised.name == "SystemExit"  # `except Exception: ...; sys.exit(1)`
    return by_itself or bool(_LOADER_ENDED.search(raised.message))


def _unwrapped(raised: Raised) -> Iterator[Raised]:
    """Give the exception of another process in front of the one that passes it on."""
    if _WRAPPERS.search(raised.message) and (inner := read_traceback(raised.message)):
        yield inner
    yield raised
