"""What `os.scandir` has found on rank 0, for all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Self


class Entry:
    """A file in a folder, as `os.DirEntry` describes it.

    Attributes:
        name: Its name.
        path: Its path, which begins as the folder was named.
    """

    def __init__(self, folder: str, name: str, kinds: list[bool], inode: int) -> None:
        self.name = name
        self.path = os.path.join(folder, name)  # noqa: PTH118
        self._kinds = kinds
        self._inode = inode

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder."""
        return self._kinds[0 if follow_symlinks else 1]

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a file."""
        return self._kinds[2 if follow_symlinks else 3]

    def is_symlink(self) -> bool:
        """Return whether it is a symbolic link."""
        return self._kinds[4]

    def is_junction(self) -> bool:
        """Return False: Windows alone has these."""
        return False

    def inode(self) -> int:
        """Return its inode."""
        return self._inode

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return what is known of it now."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)  # noqa: PTH116

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class Entries:
    """Iterates over entries, as what `os.scandir` returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Yield no more."""
        self._entries = iter([])


def entries_told(entries: list[Any]) -> list[Any]:
    """Return rank 0's entries as plain values."""
    return [[entry.name, _kinds(entry), entry.inode()] for entry in entries]


def entries_heard(folder: Any, rows: list[Any]) -> list[Entry]:
    """Return what `entries_told` was given.

    Args:
        folder: As the script has named it.
        rows: What it has returned.
    """
    return [Entry(os.fspath(folder), *row) for row in rows]


def _kinds(entry: Any) -> list[bool]:
    follow = (True, False)
    folders = [entry.is_dir(follow_symlinks=links) for links in follow]
    files = [entry.is_file(follow_symlinks=links) for links in follow]
    return [*folders, *files, entry.is_symlink()]
