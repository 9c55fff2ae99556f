"""Output streams into fasttrain's own logs; a full disk there must not end the script."""

from __future__ import annotations

import errno
import io
from io import TextIOWrapper
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Log(io.FileIO):
    """A log file that drops what the disk has no room for."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(data).nbytes


def log_stream(descriptor: int, like: Any) -> TextIOWrapper[Any]:
    """Return a text stream into a log, with the settings of Python's own stream ``like``.

    On a plain file ``print`` would raise when the disk is full. With a terminal or a pipe, where
    the script's output went before, it would not.
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
