"""Reads a file that may be a pipe, as a shell's ``<(command)`` is one."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path

from fasttrain.model.reading import without_waiting

WRITER_S = 1.0  # for whoever writes to a named pipe to open it; a shell's own is open already
LOOK_S = 0.01


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Give the beginning of a file, of at most so many bytes.

    Raises:
        OSError: It can't be read, or is a pipe to which nobody writes.
    """
    with open(path, "rb", buffering=0, opener=without_waiting) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            return _written_to(file.fileno(), most_bytes, path)
        data = b""
        while (left := most_bytes - len(data)) and (piece := file.read(left)):
            data += piece
        return data


def _written_to(pipe: int, most_bytes: int, path: Path) -> bytes:
    """Give what is written to a pipe, as long as there is somebody who writes.

    Source: pipe(7): a read that must not wait gives nothing where nobody has the pipe open for
    writing, and EAGAIN where somebody has, and hasn't written yet.
    """
    data, deadline_s = b"", time.monotonic() + WRITER_S
    while len(data) < most_bytes:
        try:
            piece = os.read(pipe, most_bytes - len(data))
        except BlockingIOError:
            select.select([pipe], [], [])
            continue
        data += piece
        if data and not piece:
            break
        if time.monotonic() > deadline_s and not data:
            raise OSError(errno.EPIPE, "nobody writes to this pipe", str(path))
        if not piece:
            time.sleep(LOOK_S)
    return data
