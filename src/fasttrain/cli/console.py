"""The rich consoles: stderr for what accompanies a run, stdout for what was asked for."""

from __future__ import annotations

from rich.console import Console

WIDTH = 100  # where stderr is no terminal


def stderr_console() -> Console:
    """Give a console that honours NO_COLOR and never wraps machine-read text at 80 columns."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def stdout_console() -> Console:
    """Give the same on stdout, for commands whose answer is what they print."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console
