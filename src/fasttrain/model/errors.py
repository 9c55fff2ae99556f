"""The exception that a user sees as three lines instead of a traceback, and how text is printed."""

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
    DIFFERS = 76
    CONTRADICTION = 78
    PREEMPTED = 85
    INTERRUPTED = 130


def demand(condition: bool, text: str) -> None:
    """Raise a ValueError with this text unless the condition holds."""
    if not condition:
        raise ValueError(text)


def demand_exit_code(code: int) -> None:
    """Raise a ValueError unless this is an exit code, where -N means signal N.

    Source: wait(2), WEXITSTATUS: the least significant 8 bits; signal(7): up to SIGRTMAX, 64.
    """
    demand(-64 <= code <= 255, f"{code} is no exit code")


def printable(text: str) -> str:
    """Return the text on one line, with every control character as an escape sequence."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def size(value: float) -> str:
    """Return a size in bytes with its unit, in powers of 1024: ``64 MiB``, ``1.25 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{_digits(value)} {unit}"
        value /= 1024
    return f"{_digits(value)} TiB"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


class FasttrainError(Exception):
    """Bad input or an impossible request, explained by what, why and fix.

    Args:
        what: What went wrong, in the user's terms.
        why: The fact that makes it wrong.
        fix: The next thing to type or change.
        slug: Stable name of the error; tests and searches match it, never the prose.
        exit_code: Exit code of the process that reports it.
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
        # These texts can hold any file name, which must neither forge a line nor move the cursor.
        what, why, fix = map(printable, (self.what, self.why, self.fix))
        return f"error: {what}\n  why: {why}\n  fix: {fix}        [{self.slug}]"
