"""A live line of progress below the script's output, on a terminal only."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fasttrain.launch.output.display import Display, PlainDisplay, QuietDisplay, write_all

CLEAR_LINE = b"\r\x1b[2K"
FIGURES = ("step", "step_s", "samples_per_s", "memory_bytes")


def choose_display(*, quiet: bool) -> Display:
    """Return the progress line if stderr is a terminal, else a display that only relays."""
    if quiet:
        return QuietDisplay()
    if not sys.stderr.isatty() or _may_reach_the_terminal(1):
        return PlainDisplay()
    return ProgressDisplay()


def _may_reach_the_terminal(descriptor: int) -> bool:
    """Return True if another process may write this output to the terminal, as ``| tee log`` does.

    Its writes would end up in the middle of the progress line.
    """
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # closed by the caller
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class ProgressDisplay:
    """Draws the progress line whenever the script's output is at the start of a line.

    A script in the middle of a line, such as one with a progress bar of its own, is never
    disturbed. If the terminal goes away, only the progress line ends.
    """

    shows = True

    def __init__(self) -> None:
        from fasttrain.cli.console import stderr_console

        self._console = stderr_console()
        self._lock = threading.Lock()
        self._line = self._figures = b""
        self._drawn = self._gone = False
        self._at_start = True

    def write(self, descriptor: int, data: bytes) -> None:
        """Write the script's bytes above the line.

        Raises:
            OSError: If these bytes can't be written; the caller lets the script know.
        """
        with self._lock:  # the relay writes from a thread of its own
            self._erase()
            write_all(descriptor, data)
            self._at_start = data.endswith(b"\n")
            self._draw()

    def progress(self, event: dict[str, Any]) -> None:
        """Draw the figures of an event, or what is being compiled; ignore malformed events."""
        compiling = event.get("compiling")
        if isinstance(compiling, str) and (not compiling or compiling.isidentifier()):
            line = self._render(f"compiling {compiling} ...") if compiling else self._figures
        elif all(_is_number(event.get(name)) for name in FIGURES):
            line = self._figures = self._render(", ".join(_figures(event)))
        else:
            return
        with self._lock:
            self._erase()
            self._line = line
            self._draw()

    def tick(self) -> None:
        """Do nothing: the line is drawn when an event comes."""

    def tell(self, text: str) -> None:
        """Write a line to stderr, at the start of one."""
        begin = b"" if self._at_start else b"\n"
        with suppress(OSError):  # stderr has no reader any more
            self.write(2, begin + f"fasttrain: {text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Erase the line."""
        with self._lock:
            self._erase()
            self._line = b""

    def _render(self, words: str) -> bytes:
        from rich.text import Text

        text = Text(f"fasttrain: {words}", style="dim")
        text.truncate(max(self._console.width - 1, 1))
        with self._console.capture() as capture:
            self._console.print(text, end="")
        return capture.get().encode()

    def _draw(self) -> None:
        if self._line and self._at_start and not self._gone:
            self._drawn = True
            self._put(self._line)

    def _erase(self) -> None:
        if self._drawn and not self._gone:
            self._drawn = False
            self._put(CLEAR_LINE)

    def _put(self, data: bytes) -> None:
        try:
            write_all(2, data)
        except OSError:
            self._gone = True


def _figures(event: dict[str, Any]) -> Iterator[str]:
    from fasttrain.cli.cards.receipt import seconds
    from fasttrain.model.errors import size

    yield f"step {event['step']:,}"
    if event["step_s"]:
        yield f"{seconds(event['step_s'])}/step"
    if event["samples_per_s"]:
        yield f"{event['samples_per_s']:,.0f} samples/s"
    yield size(event["memory_bytes"])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < sys.maxsize  # False for NaN
