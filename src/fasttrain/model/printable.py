"""Text that any terminal, log and stream takes: one line without control characters."""

from __future__ import annotations


def printable(text: str) -> str:
    """Give the text on one line, with every control character written as an escape."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
