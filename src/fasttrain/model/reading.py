"""Read files without blocking for ever on what may lie in the place of one, such as a pipe.

Not a part of `codec`: planning, which is pure, imports that one and must not import os.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, TypeVar

from fasttrain.model.codec import loads

T = TypeVar("T")


def load(kind: type[T], path: Path) -> T:
    """Return a dataclass built from a JSON file.

    Raises:
        OSError: If the file can't be read, or is not a regular file.
        CodecError: If it is not JSON, or does not fit the dataclass.
    """
    with open_regular(path) as file:
        return loads(kind, file.read())


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file, and nothing else: opening a pipe that has no writer would block.

    Raises:
        OSError: If the file can't be opened, or is not a regular file.
    """
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115 - Path.open takes no opener
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def without_waiting(path: str, flags: int) -> int:
    """Open a file as `open` does, without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
