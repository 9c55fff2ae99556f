"""Text that any terminal, log and stream takes: one line without control characters."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text on one line, with every control character written as an escape."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


# Sizes as a person reads them.


def size(value: float) -> str:
    """Return a size in bytes with its unit, in powers of 1024: ``64 MiB``, ``1.25 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{_digits(value)} {unit}"
        value /= 1024
    return f"{_digits(value)} TiB"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
