"""Why a rank failed, in words, and what to do about it: one table, its special rows first."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.launch.crash.cause_rules import (
    Cause,
    Facts,
    Heals,
    exit_code,
    other_exception,
    signalled,
)
from fasttrain.launch.crash.causes_around import AROUND, SHM_FIX
from fasttrain.launch.crash.causes_inside import INSIDE
from fasttrain.launch.crash.evidence import Case

CAUSES = (*AROUND, *INSIDE)

# What a signal or an exit code alone tells; an exception is told by its own words.
ENDS = (
    Cause("exception", Heals.TRAINED, other_exception, "{error}", ""),
    Cause(
        "killed", Heals.ALWAYS, signalled("SIGKILL"),
        "something killed it with SIGKILL; no sign that memory ran out was seen",
        "look for a job's memory or time limit, a cleaning script, or kill -9 by hand",
    ),
    Cause(
        "segfault", Heals.ONCE, signalled("SIGSEGV"),
        "compiled code reached outside of its memory{stack}",
        "look for an extension that was built for another version; run with --debug",
    ),
    Cause(
        "bus-error", Heals.ONCE, signalled("SIGBUS"),
        "memory that was mapped has nothing behind it: /dev/shm ({shm}) is full, or a mapped file"
        " was cut{stack}", SHM_FIX,
    ),
    Cause(
        "illegal-instruction", Heals.NEVER, signalled("SIGILL"),
        "compiled code uses an instruction that this CPU doesn't have{stack}",
        "install builds for this CPU; fasttrain doctor names what it has",
    ),
    Cause(
        "aborted", Heals.ONCE, signalled("SIGABRT"), "compiled code gave up{gave_up}{stack}",
        "look at the last lines of its log",
    ),
    Cause(
        "arithmetic", Heals.ONCE,
        signalled("SIGFPE"), "compiled code divided an integer by zero{stack}", "",
    ),
    Cause(
        "interrupted", Heals.NEVER,
        signalled("SIGINT"), "it was interrupted by SIGINT (ctrl-C)", "",
    ),
    Cause(
        "stopped", Heals.ALWAYS,
        signalled("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"),
        "it was stopped from outside by {signal}",
        "",
    ),
    Cause("signal", Heals.ALWAYS, signalled(), "it died of {signal}{stack}", ""),
    Cause(
        "exit", Heals.TRAINED, exit_code,
        "the script ended itself with exit code {code}{exit_place}{exit_text}", "",
    ),
)  # fmt: skip

HUNG = "hang"  # what a run is restarted for without that a rank has failed
_HEALS = {HUNG: Heals.ONCE} | {cause.slug: cause.heals for cause in (*CAUSES, *ENDS)}
# What lasts while an exception is handled, so that what fails then may well fail by it; a missing
# file or module that was handled says nothing of what came later.
LASTING = {
    "device-memory", "shared-memory", "host-memory", "device-fault", "device-assert",
    "illegal-access", "disk-full", "too-many-files", "disk-error",
}  # fmt: skip
_OF_PEERS = {cause.slug for cause in CAUSES if cause.of_a_peer}


def heals(slug: str) -> Heals:
    """Return whether another attempt can end better behind a cause."""
    return _HEALS[slug]


def is_of_a_peer(slug: str) -> bool:
    """Return whether a cause is what a rank says of another one that it lost or waited for."""
    return slug in _OF_PEERS


def _asked(case: Case) -> Iterator[Cause]:
    return (
        cause for cause in CAUSES
        if not case.handled or cause.of_a_peer or cause.slug in LASTING
    )  # fmt: skip


def find_cause(case: Case) -> tuple[Cause, Facts]:
    """Return the first row that fits, and its facts.

    The exception that ended the script is asked first; where no row knows it, those that led to
    it: what torch makes of a full disk, the script may make a RuntimeError of its own. Of one that
    was only being handled then (no `raise ... from`), only what lasts is a cause.
    """
    for one in case.each():
        for cause in _asked(one):
            if (facts := cause.rule(one)) is not None:
                return cause, facts
    for cause in ENDS:
        if (facts := cause.rule(case.telling())) is not None:
            return cause, facts
    raise AssertionError("the last row takes whatever is left")
