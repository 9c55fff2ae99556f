"""stdout and stderr as fasttrain writes to them: what nobody can take must not change a run."""

from __future__ import annotations

import io
import os
import select
import sys
from pathlib import Path
from typing import Any

from fasttrain.model.errors import ExitCode, FasttrainError

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


def mend_streams() -> None:
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
