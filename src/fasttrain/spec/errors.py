"""The one exception that a user sees as three lines instead of a traceback."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of fasttrain itself; the script's own code passes through unchanged."""

    USAGE = 2
    NOT_FINITE = 65
    UNAVAILABLE = 69
    BUG = 70
    CANNOT_START = 71
    HUNG = 75
    CONTRADICTION = 78
    INTERRUPTED = 130


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
        return f"error: {self.what}\n  why: {self.why}\n  fix: {self.fix}        [{self.slug}]"
