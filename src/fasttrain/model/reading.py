"""Reads files so that nothing that lies in the place of one can block for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, TypeVar

from fasttrain.model.codec import loads

T = TypeVar("T")


def load(kind: type[T], path: Path) -> T:
    """Read a JSON file into a dataclass.

    Raises:
        OSError: It can't be read, or is no regular file.
        CodecError: It is not JSON, or does not have the dataclass's shape.
    """
    with open_regular(path) as file:
        return loads(kind, file.read())


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file; a pipe, without somebody who writes to it, would block here.

    Raises:
        OSError: It can't be opened, or is something else.
    """
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115 - Path.open takes no opener
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def without_waiting(path: str, flags: int) -> int:
    """Open as `open` would, but don't wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
