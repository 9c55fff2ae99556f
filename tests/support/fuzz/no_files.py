"""What may lie where a file is expected, and is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = ("folder", "pipe", "loop", "dangling", "endless", "empty device", "socket", "memory")
LINKS = {
    "loop": None, "dangling": "nowhere/at/all", "endless": "/dev/zero", "empty device": "/dev/null",
    "memory": "/proc/self/mem",
}  # fmt: skip


@contextmanager
def in_place(path: Path, kind: str) -> Iterator[None]:
    """Have something else lie there for a while."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(os.path.relpath(path))
    else:
        path.symlink_to(LINKS[kind] or path.name)
    try:
        yield
    finally:
        if path.is_dir() and not path.is_symlink():  # unless it went with its run directory
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
