"""Write files that only their owner can read, and never leave half a file."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Bound at import: in a worker, os.replace and os.unlink may be patched to keep other ranks than 0
# from writing the script's files.
_replace, _unlink = os.replace, os.unlink
RESERVED_BYTES = 64 << 10  # an exception with its calls takes some 8 KiB
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def write_private(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file atomically: whole or not at all, even if this process is killed.

    Args:
        path: The file.
        text: Its content; lone surrogates become question marks.
        durable: Whether it must survive a power failure too, which takes an fsync.

    Raises:
        OSError: If it can't be written; nothing of it is left.
    """
    draft = _draft(path)
    descriptor = os.open(draft, _FLAGS, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.truncate()  # only after the write: until then the reserved space must stay ours
            file.flush()
            if durable:
                os.fsync(descriptor)
        _replace(draft, path)
    except OSError:
        _unlink(draft)  # it takes space on a disk that may be full
        raise


def reserve(path: Path, size_bytes: int = RESERVED_BYTES) -> None:
    """Reserve disk space so that `write_private` can write this file on a full disk.

    No-op on a system without posix_fallocate, such as macOS.

    Raises:
        OSError: If there is no space even now.
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
    """Free the space that was reserved for a file, if any."""
    with suppress(OSError):  # removed already, perhaps with the run directory
        _unlink(_draft(path))


def _draft(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


class Lines:
    """A file to which lines are appended, each by one write, which the kernel puts at the end.

    Only the last line can be incomplete, after a SIGKILL between two pages of a write, or on a full
    disk; the next line then starts on a line of its own.
    Source: Linux 6.1, mm/filemap.c, generic_perform_write, fatal_signal_pending
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cut: bool | None = None

    def add(self, line: str) -> None:
        """Append a line, given without its newline.

        Raises:
            OSError: If it can't be written, or only in part.
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
    """Return True if a file ends with an incomplete line, as a full disk or SIGKILL leaves it."""
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
    """Return a descriptor that appends to a private file.

    Raises:
        OSError: If it can't be opened.
    """
    return os.open(path, _FLAGS | os.O_APPEND, 0o600)


# Less free space than this is reported. One checkpoint of 100 million parameters with AdamW's state
# in fp32 is 1.2 GB.
FEW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Room:
    """Free space of a file system for this user; None if the file system doesn't report it.

    Attributes:
        free_bytes: Bytes.
        free_files: Inodes: new files, folders and links.
    """

    free_bytes: int | None
    free_files: int | None


def room_at(folder: Path) -> Room:
    """Return the free space at an existing folder; a quota may allow less.

    File systems without a limit report a total of 0, as btrfs does for inodes.
    Source: statvfs(3); Linux, fs/btrfs/super.c, btrfs_statfs, which leaves f_files at 0

    Raises:
        OSError: If the file system can't be queried.
    """
    found = os.statvfs(folder)
    return Room(
        free_bytes=found.f_bavail * found.f_frsize if found.f_blocks else None,
        free_files=found.f_favail if found.f_files else None,
    )
