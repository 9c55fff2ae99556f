"""Writes files that only their owner can read, so that none is ever half of one."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# As they are now: in a worker, others may take their place to keep a rank from writing.
_replace, _unlink = os.replace, os.unlink
RESERVED_BYTES = 64 << 10  # an exception with its calls takes some 8 KiB
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def write_private(path: Path, text: str, *, durable: bool = True) -> None:
    """Put a file in its place, whole or not at all, whenever this process is killed.

    Args:
        path: Where it goes.
        text: What it holds; lone surrogates become question marks.
        durable: Whether it must outlive the machine's loss of power too, for which the disk is
            waited for.

    Raises:
        OSError: It can't be written; nothing of it is left.
    """
    draft = _draft(path)
    descriptor = os.open(draft, _FLAGS, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.truncate()  # behind it, because what was reserved must not be anybody's meanwhile
            file.flush()
            if durable:
                os.fsync(descriptor)
        _replace(draft, path)
    except OSError:
        _unlink(draft)  # it takes room where there may be none
        raise


def reserve(path: Path, size_bytes: int = RESERVED_BYTES) -> None:
    """Take the room for a file that `write_private` is to write when others have filled the disk.

    A system that can't set room aside, such as macOS, keeps none.

    Raises:
        OSError: There is none, even now.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    draft = _draft(path)
    descriptor = os.open(draft, _FLAGS, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        _unlink(draft)
        raise
    finally:
        os.close(descriptor)


def give_back(path: Path) -> None:
    """Give up what was reserved for a file; no-op where nothing is."""
    with suppress(OSError):  # gone already, or with the run directory
        _unlink(_draft(path))


def _draft(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


class Lines:
    """Lines that are added to a file, each by one call into the system.

    The kernel puts each at the end. Only the last one can be cut off, where SIGKILL comes between
    two pages of a write, or by a full disk; the next one then begins on a line of its own.
    Source: Linux 6.1, mm/filemap.c, generic_perform_write, fatal_signal_pending
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cut: bool | None = None

    def add(self, line: str) -> None:
        """Add a line, which has no line end of its own.

        Raises:
            OSError: It can't be written, or only a part of it.
        """
        if self._cut is None:
            self._cut = _ends_amid_line(self._path)
        descriptor = open_log(self._path)
        try:
            left = (b"\n" if self._cut else b"") + line.encode() + b"\n"
            while left:
                left = left[os.write(descriptor, left) :]
                self._cut = bool(left)
        finally:
            os.close(descriptor)


def _ends_amid_line(path: Path) -> bool:
    """Return whether a file was left with half a line, by a process that met a full disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        return bool(size) and os.pread(descriptor, 1, size - 1) != b"\n"
    finally:
        os.close(descriptor)


def open_log(path: Path | str) -> int:
    """Return a descriptor that adds to the end of a private file.

    Raises:
        OSError: It can't be opened.
    """
    return os.open(path, _FLAGS | os.O_APPEND, 0o600)


# How much room there is for files.


# One checkpoint of 100 million parameters with AdamW's state in fp32 is 1.2 GB.
FEW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Room:
    """What is free of a file system for this user; None where it doesn't say.

    Attributes:
        free_bytes: Bytes.
        free_files: New files, folders and links.
    """

    free_bytes: int | None
    free_files: int | None


def room_at(folder: Path) -> Room:
    """Give what is free for a folder that exists; a quota may allow less.

    File systems without limits of these kinds, such as btrfs for files, count none at all.
    Source: statvfs(3); Linux, fs/btrfs/super.c, btrfs_statfs, which leaves f_files at 0

    Raises:
        OSError: The file system can't be asked.
    """
    found = os.statvfs(folder)
    return Room(
        free_bytes=found.f_bavail * found.f_frsize if found.f_blocks else None,
        free_files=found.f_favail if found.f_files else None,
    )
