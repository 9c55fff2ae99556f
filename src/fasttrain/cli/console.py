"""The rich consoles: stderr for what accompanies a run, stdout for what was asked for."""

from __future__ import annotations

import io
import json
import os
import re
import select
import sys
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console

from fasttrain import __version__
from fasttrain.config.environ import read_environ
from fasttrain.model.codec import to_data
from fasttrain.model.errors import ExitCode, FasttrainError

WIDTH = 100  # where the stream is no terminal
_PADDING = re.compile(r" +$", re.MULTILINE)
WIDEST = 65_535  # Source: ioctl_tty(2), struct winsize: columns are an unsigned short


def stderr_console() -> Console:
    """Return a console that honours NO_COLOR and never wraps machine-read text at 80 columns."""
    return _console(WIDTH, stderr=True)


def stdout_console(width: int = WIDTH) -> Console:
    """Return the same on stdout, for commands whose answer is what they print.

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
    """True if rich can take a variable: it calls int() on any digits, and believes the number."""
    if name not in ("COLUMNS", "LINES"):
        return True
    return value.isdecimal() and len(value) <= len(str(WIDEST)) and 0 < int(value) <= WIDEST


# stdout and stderr as fasttrain writes to them: what nobody can take must not change a run.


ERRORS = "backslashreplace"  # for a file name that is no text, or a locale without our letters


class Outlet(io.FileIO):
    """The descriptor below one of the two streams, which stays open when this object is gone."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        """Write some of ``data``, and say how much.

        Raises:
            FasttrainError: As `lost` does.
        """
        try:
            while (taken := super().write(data)) is None:  # it has no room now, and doesn't wait
                select.select([], [self], [])
        except OSError as error:
            self.lost(error)
            return len(data)
        return taken

    def lost(self, error: OSError) -> None:
        """Leave it at that: the reader is gone, the terminal closed, the disk full.

        On stderr there is nobody to tell, and the exit code is the script's.
        """


class Answers(Outlet):
    """The same of stdout, for commands whose answer is what they print."""

    failed = False

    def lost(self, error: OSError) -> None:
        """Leave it at that where the reader has gone, as with ``fasttrain run --dry-run | head``.

        Raises:
            FasttrainError: ``stdout`` otherwise, once: Python writes what is left when it ends.
        """
        if isinstance(error, BrokenPipeError) or self.failed:
            return
        self.failed = True
        raise FasttrainError(
            "the answer can't be written to stdout",
            why=error.strerror or str(error),
            fix="make room, or send it somewhere else",
            slug="stdout",
            exit_code=ExitCode.UNAVAILABLE,
        )


def prepare_streams() -> None:
    """Have stdout and stderr take any text, and go on where they can't be written."""
    # Closed by the caller: what fasttrain would say has nowhere to go.
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as we live
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    # Whoever calls this function from Python may have streams of their own in their places.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(Answers(1), sys.__stdout__)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ERRORS)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(Outlet(2), sys.__stderr__)


def _stream(outlet: Outlet, before: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(outlet),
        encoding=before.encoding,
        errors=ERRORS,
        newline="\n",
        line_buffering=before.line_buffering or before.write_through,  # python -u
        write_through=before.write_through,
    )


# The one versioned envelope of everything that ``--json`` prints.


ENVELOPE_SCHEMA = 1


def envelope(kind: str, value: Any) -> str:
    """Return JSON text: ``{"schema": 1, "fasttrain": VERSION, "kind": …, "data": …}``."""
    content = {
        "schema": ENVELOPE_SCHEMA,
        "fasttrain": __version__,
        "kind": kind,
        "data": to_data(value),
    }
    return json.dumps(content, indent=2)
