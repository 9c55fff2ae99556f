"""The one exception that a user sees as three lines instead of a traceback."""

from __future__ import annotations

from enum import IntEnum

from fasttrain.model.printable import printable


class ExitCode(IntEnum):
    """Exit codes of fasttrain itself; the script's own code passes through unchanged."""

    USAGE = 2
    NOT_FINITE = 65
    UNAVAILABLE = 69
    BUG = 70
    CANNOT_START = 71
    HUNG = 75
    CONTRADICTION = 78
    PREEMPTED = 85
    INTERRUPTED = 130


def demand(condition: bool, text: str) -> None:
    """Raise a ValueError with this text where something isn't as it must be."""
    if not condition:
        raise ValueError(text)


def demand_exit_code(code: int) -> None:
    """Raise a ValueError for what no process ends with, -N standing for signal N.

    Source: wait(2), WEXITSTATUS: the least significant 8 bits; signal(7): up to SIGRTMAX, 64.
    """
    demand(-64 <= code <= 255, f"{code} is no exit code")


class FasttrainError(Exception):
    """Bad input or an impossible request, told as what, why and fix.

    Args:
        what: What went wrong, in the user's terms.
        why: The fact that makes it wrong.
        fix: The next thing to type or change.
        slug: Stable name of the error; tests and searches match it, never the prose.
        exit_code: Exit status of the process that reports it.
    """

    def __init__(
        self,
        what: str,
        *,
        why: str,
        fix: str,
        slug: str,
        exit_code: ExitCode = ExitCode.CONTRADICTION,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.slug = slug
        self.exit_code = exit_code

    def __str__(self) -> str:
        # What is told may hold any file name, and must neither forge a line nor move the cursor.
        what, why, fix = map(printable, (self.what, self.why, self.fix))
        return f"error: {what}\n  why: {why}\n  fix: {fix}        [{self.slug}]"
