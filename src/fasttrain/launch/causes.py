"""Why a rank failed, in words, and what to do about it: one table, its special rows first."""

from __future__ import annotations

from fasttrain.launch.case import Case
from fasttrain.launch.cause import Cause
from fasttrain.launch.cause_rules import Facts, exit_code, other_exception, signalled
from fasttrain.launch.causes_around import AROUND, SHM_FIX
from fasttrain.launch.causes_inside import INSIDE

CAUSES = (*AROUND, *INSIDE)

# What a signal or an exit code alone tells; an exception is told by its own words.
ENDS = (
    Cause("exception", other_exception, "{kind}: {message}", ""),
    Cause(
        "killed", signalled("SIGKILL"),
        "something killed it with SIGKILL; no sign that memory ran out was seen",
        "look for a job's memory or time limit, a cleaning script, or kill -9 by hand",
    ),
    Cause(
        "segfault", signalled("SIGSEGV"),
        "compiled code reached outside of its memory{stack}",
        "look for an extension that was built for another version; run with --debug",
    ),
    Cause(
        "bus-error", signalled("SIGBUS"),
        "memory that was mapped has nothing behind it: /dev/shm ({shm}) is full, or a mapped file"
        " was cut{stack}", SHM_FIX,
    ),
    Cause(
        "illegal-instruction", signalled("SIGILL"),
        "compiled code uses an instruction that this CPU doesn't have{stack}",
        "install builds for this CPU; fasttrain doctor names what it has",
    ),
    Cause(
        "aborted", signalled("SIGABRT"), "compiled code gave up{last_line}{stack}",
        "look at the last lines of its log",
    ),
    Cause(
        "arithmetic", signalled("SIGFPE"), "compiled code divided an integer by zero{stack}", "",
    ),
    Cause("interrupted", signalled("SIGINT"), "it was interrupted by SIGINT (ctrl-C)", ""),
    Cause(
        "stopped", signalled("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"),
        "it was stopped from outside by {signal}",
        "",
    ),
    Cause("signal", signalled(), "it died of {signal}{stack}", ""),
    Cause(
        "exit", exit_code,
        "the script ended itself with exit code {code}{exit_place}{exit_text}", "",
    ),
)  # fmt: skip


def find_cause(case: Case) -> tuple[Cause, Facts]:
    """Give the first row that fits, and its facts.

    The exception that ended the script is asked first; where no row knows it, those that led to
    it: what torch makes of a full disk, the script may make a RuntimeError of its own.
    """
    for one in case.each():
        for cause in CAUSES:
            if (facts := cause.rule(one)) is not None:
                return cause, facts
    for cause in ENDS:
        if (facts := cause.rule(case.telling())) is not None:
            return cause, facts
    raise AssertionError("the last row takes whatever is left")
