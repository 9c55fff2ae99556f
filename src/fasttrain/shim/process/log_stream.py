"""Output streams into a log of fasttrain's own, whose full disk must not end the script."""

from __future__ import annotations

import errno
import io
from io import TextIOWrapper
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Log(io.FileIO):
    """Takes what the disk has no room for, and drops it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(data).nbytes


def log_stream(descriptor: int, like: Any) -> TextIOWrapper[Any]:
    """Return a text stream like Python's own ``like``, into a log.

    Print raises where it can't write, and a script with a terminal or a pipe would have gone on.
    """
    raw = _Log(descriptor, "w", closefd=False)
    raw.name = like.name
    unbuffered = isinstance(like.buffer, io.RawIOBase)  # python -u
    stream: TextIOWrapper[Any] = TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )
    stream.mode = like.mode  # type: ignore[misc]
    return stream
