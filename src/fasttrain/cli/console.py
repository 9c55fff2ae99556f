"""The rich consoles: stderr for what accompanies a run, stdout for what was asked for."""

from __future__ import annotations

import io
import re
from typing import IO, cast

from rich.console import Console

from fasttrain.config.environ import read_environ

WIDTH = 100  # where the stream is no terminal
_PADDING = re.compile(r" +$", re.MULTILINE)
WIDEST = 65_535  # Source: ioctl_tty(2), struct winsize: columns are an unsigned short


def stderr_console() -> Console:
    """Give a console that honours NO_COLOR and never wraps machine-read text at 80 columns."""
    return _console(WIDTH, stderr=True)


def stdout_console(width: int = WIDTH) -> Console:
    """Give the same on stdout, for commands whose answer is what they print.

    Args:
        width: Columns where stdout is no terminal.
    """
    return _console(width, stderr=False)


def _console(width: int, *, stderr: bool) -> Console:
    environ = {name: value for name, value in read_environ().items() if _is_sound(name, value)}
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, _environ=environ)
    if not console.is_terminal:
        console.width = width
        console.file = cast("IO[str]", _Trimmed(console.file))
    return console


class _Trimmed(io.TextIOBase):
    """A stream without the blanks by which rich fills its tables' lines."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the encoding of the stream, by which rich chooses its characters."""
        return str(getattr(self._stream, "encoding", "utf-8"))

    def write(self, text: str) -> int:
        """Write whole lines, as rich does."""
        return self._stream.write(_PADDING.sub("", text))

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def _is_sound(name: str, value: str) -> bool:
    """Whether rich can take a variable: it calls int() on any digits, and believes the number."""
    if name not in ("COLUMNS", "LINES"):
        return True
    return value.isdecimal() and len(value) <= len(str(WIDEST)) and 0 < int(value) <= WIDEST
