"""What is to be done when the script has ended well, before the interpreter ends."""

from __future__ import annotations

from collections.abc import Callable

at_clean_end: list[Callable[[], None]] = []


def ended_well() -> None:
    """Do it."""
    for act in at_clean_end:
        act()
