"""The table of causes: why a rank failed and what to do about it; special rows come first."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.launch.crash.cause_rules import (
    Cause,
    Facts,
    Retry,
    exit_code,
    other_exception,
    signalled,
)
from fasttrain.launch.crash.causes_around import AROUND, SHM_FIX
from fasttrain.launch.crash.causes_inside import INSIDE
from fasttrain.launch.crash.evidence import Evidence

CAUSES = (*AROUND, *INSIDE)

# What a signal or an exit code alone shows; an exception is reported in its own words.
ENDS = (
    Cause("exception", Retry.TRAINED, other_exception, "{error}", ""),
    Cause(
        "killed", Retry.ALWAYS, signalled("SIGKILL"),
        "something killed it with SIGKILL; no sign that memory ran out was seen",
        "look for a job's memory or time limit, a cleaning script, or kill -9 by hand",
    ),
    Cause(
        "segfault", Retry.ONCE, signalled("SIGSEGV"),
        "compiled code reached outside of its memory{stack}",
        "look for an extension that was built for another version; run with --debug",
    ),
    Cause(
        "bus-error", Retry.ONCE, signalled("SIGBUS"),
        "memory that was mapped has nothing behind it: /dev/shm ({shm}) is full, or a mapped file"
        " was cut{stack}", SHM_FIX,
    ),
    Cause(
        "illegal-instruction", Retry.NEVER, signalled("SIGILL"),
        "compiled code uses an instruction that this CPU doesn't have{stack}",
        "install builds for this CPU; fasttrain doctor names what it has",
    ),
    Cause(
        "aborted", Retry.ONCE, signalled("SIGABRT"), "compiled code gave up{gave_up}{stack}",
        "look at the last lines of its log",
    ),
    Cause(
        "arithmetic", Retry.ONCE,
        signalled("SIGFPE"), "compiled code divided an integer by zero{stack}", "",
    ),
    Cause(
        "interrupted", Retry.NEVER,
        signalled("SIGINT"), "it was interrupted by SIGINT (ctrl-C)", "",
    ),
    Cause(
        "stopped", Retry.ALWAYS,
        signalled("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"),
        "it was stopped from outside by {signal}",
        "",
    ),
    Cause("signal", Retry.ALWAYS, signalled(), "it died of {signal}{stack}", ""),
    Cause(
        "exit", Retry.TRAINED, exit_code,
        "the script ended itself with exit code {code}{exit_place}{exit_text}", "",
    ),
)  # fmt: skip

HUNG = "hang"  # the one cause without a row: no rank has failed, and the launcher ended them
_RETRY = {HUNG: Retry.ONCE} | {cause.slug: cause.retry for cause in (*CAUSES, *ENDS)}
# Causes that last while an exception is handled, so that what fails next may well fail by them. A
# missing file or module that was handled explains nothing of what came later.
LASTING = {
    "device-memory", "shared-memory", "host-memory", "device-fault", "device-assert",
    "illegal-access", "disk-full", "too-many-files", "disk-error",
}  # fmt: skip
_OF_PEERS = {cause.slug for cause in CAUSES if cause.of_a_peer}


def retry_of(slug: str) -> Retry:
    """Return whether another attempt can end better after a cause."""
    return _RETRY[slug]


def is_of_a_peer(slug: str) -> bool:
    """True if a cause is what a rank reports of another one that it lost or waited for."""
    return slug in _OF_PEERS


def _candidates(evidence: Evidence) -> Iterator[Cause]:
    return (
        cause for cause in CAUSES
        if not evidence.handled or cause.of_a_peer or cause.slug in LASTING
    )  # fmt: skip


def find_cause(evidence: Evidence) -> tuple[Cause, Facts]:
    """Return the first row that fits, and its facts.

    The exception that ended the script is asked first; where no row knows it, those that led to
    it: a script may turn torch's error about a full disk into a RuntimeError of its own. Of an
    exception that was only being handled then (no `raise ... from`), only what lasts is a cause.
    """
    for one in evidence.each():
        for cause in _candidates(one):
            if (facts := cause.rule(one)) is not None:
                return cause, facts
    for cause in ENDS:
        if (facts := cause.rule(evidence.telling())) is not None:
            return cause, facts
    raise AssertionError("the last row takes whatever is left")
