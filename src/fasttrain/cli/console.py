"""The rich consoles, and the two streams below them: stderr around a run, stdout for answers."""

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

WIDTH = 100  # columns if the stream is no terminal
_PADDING = re.compile(r" +$", re.MULTILINE)
WIDEST = 65_535  # Source: ioctl_tty(2), struct winsize: columns are an unsigned short


def stderr_console() -> Console:
    """Return a console on stderr, which honours NO_COLOR."""
    return _console(WIDTH, stderr=True)


def stdout_console(width: int = WIDTH) -> Console:
    """Return a console on stdout, for commands whose answer is what they print.

    Args:
        width: Columns if stdout is no terminal.
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
    """A stream without the trailing blanks with which rich pads the lines of tables."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the stream, by which rich chooses its characters."""
        return str(getattr(self._stream, "encoding", "utf-8"))

    def write(self, text: str) -> int:
        """Write whole lines, as rich does."""
        return self._stream.write(_PADDING.sub("", text))

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def _is_sound(name: str, value: str) -> bool:
    """Return True if rich can handle a variable: it trusts any number in COLUMNS and LINES."""
    if name not in ("COLUMNS", "LINES"):
        return True
    return value.isdecimal() and len(value) <= len(str(WIDEST)) and 0 < int(value) <= WIDEST


# For a file name that is not text, and for a locale that lacks a character.
ERRORS = "backslashreplace"


class Outlet(io.FileIO):
    """The descriptor of stdout or stderr; output that can't be written must not end a run.

    The descriptor stays open when this object is deleted.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        """Write a part of ``data``; return the number of bytes written, or dropped.

        Raises:
            FasttrainError: As `lost` does.
        """
        try:
            while (taken := super().write(data)) is None:  # non-blocking, and full at the moment
                select.select([], [self], [])
        except OSError as error:
            self.lost(error)
            return len(data)
        return taken

    def lost(self, error: OSError) -> None:
        """Drop output that can't be written: a reader has gone, a terminal closed, a disk is full.

        On stderr there is nowhere to report that, and the exit code is the script's.
        """


class StdoutOutlet(Outlet):
    """The descriptor of stdout, for commands whose answer is what they print."""

    failed = False

    def lost(self, error: OSError) -> None:
        """Drop the output if its reader has gone, as in ``fasttrain run --dry-run | head``.

        Raises:
            FasttrainError: ``stdout`` otherwise, but only once: at exit Python flushes again.
        """
        if isinstance(error, BrokenPipeError) or self.failed:
            return
        self.failed = True
        raise FasttrainError(
            "the answer can't be written to stdout",
            why=error.strerror or str(error),
            fix="free some space, or write it somewhere else",
            slug="stdout",
            exit_code=ExitCode.UNAVAILABLE,
        )


def prepare_streams() -> None:
    """Make stdout and stderr accept any text, and let a run go on if they can't be written."""
    # None if the caller has closed the descriptor.
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as we live
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    # A caller in Python, such as a test, may have replaced the streams by its own.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(StdoutOutlet(1), sys.__stdout__)
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


ENVELOPE_SCHEMA = 1  # of everything that --json prints


def envelope(kind: str, value: Any) -> str:
    """Return JSON text: ``{"schema": 1, "fasttrain": VERSION, "kind": …, "data": …}``."""
    content = {
        "schema": ENVELOPE_SCHEMA,
        "fasttrain": __version__,
        "kind": kind,
        "data": to_data(value),
    }
    return json.dumps(content, indent=2)
