"""What a rank other than 0 has of its own on disk: copies of what it writes, temporary files."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fasttrain.shim.hooks import patching

_SPECIAL = ("/dev/", "/proc/", "/sys/")


def path_of(target: Any) -> str:
    """Return the absolute path of what is written or read; empty for what is no file by name."""
    if hasattr(target, "name") and not isinstance(target, os.PathLike):
        target = target.name  # an open file
    if isinstance(target, bytes):
        target = os.fsdecode(target)
    if not target or not isinstance(target, str | os.PathLike):
        return ""
    return os.path.abspath(os.fsdecode(target))  # noqa: PTH100 - symlinks stay as they are named


class OwnCopies:
    """The paths that are this rank's own.

    Args:
        rank: This rank; rank 0 writes where the script says.
        scratch: A folder of this rank's alone.
    """

    def __init__(self, rank: int, scratch: Path) -> None:
        self._rank = rank
        self._scratch = scratch
        self._own: list[str] = [*_SPECIAL]
        folder, name = os.path.split(path_of(scratch))
        # Those of all ranks: what a file is must be the same on each.
        self._scratches = os.path.join(folder, "")  # noqa: PTH118
        self._scratch_name = re.compile(re.escape(name).replace(str(rank), r"\d+") + r"(/|$)")
        self._files: set[str] = set()
        self._copied: set[str] = set()
        self._in_use: set[str] = set()

    def install(self, undo: ExitStack) -> None:
        """Take note of temporary files and folders, whose names are drawn on each rank."""
        for name, folder_at, note in (
            ("mkdtemp", 2, self._note_folder),
            ("mktemp", 2, self._note_file),
            ("_mkstemp_inner", 0, self._note_descriptor),  # of all other functions there
        ):
            make = functools.partial(self._noting, folder_at, note)
            patching.wrap(tempfile, name, make, undo)

    def _noting(
        self, folder_at: int, note: Callable[[Any], None], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def made(*args: Any, **kwargs: Any) -> Any:
            if len(args) > folder_at:
                folder = self._temporary(args[folder_at])
                args = (*args[:folder_at], folder, *args[folder_at + 1 :])
            elif "dir" in kwargs:
                kwargs["dir"] = self._temporary(kwargs["dir"])
            result = original(*args, **kwargs)
            note(result)
            return result

        return made

    def _temporary(self, folder: Any) -> Any:
        """Return the folder for a temporary file: what the script lists holds rank 0's alone."""
        path = path_of(folder)
        usual = not path or path == path_of(tempfile.gettempdir())
        if not self._rank or usual or self.is_own(path) or not Path(path).is_dir():
            return folder
        own = self.copy_of(path)
        own.mkdir(parents=True, exist_ok=True)
        return os.fsencode(own) if isinstance(folder, bytes) else str(own)

    def _note_folder(self, made: Any) -> None:
        self._own.append(os.path.join(path_of(made), ""))  # noqa: PTH118

    def _note_file(self, made: Any) -> None:
        self._files.add(path_of(made))

    def _note_descriptor(self, made: Any) -> None:
        self._note_file(made[1])

    def is_own(self, path: str) -> bool:
        """Return whether each rank has its own at a path, which is absolute."""
        if path in self._files or self.is_scratch(path):
            return True
        return (path + os.sep).startswith(tuple(self._own))

    def is_scratch(self, path: str) -> bool:
        """Return whether a path is in a folder that fasttrain has made for a rank."""
        ours = path.startswith(self._scratches)
        return ours and self._scratch_name.match(path, len(self._scratches)) is not None

    def copy_of(self, path: str) -> Path:
        """Return where this rank writes what rank 0 writes at a path."""
        return self._scratch / path.lstrip(os.sep)

    def to_read(self, path: str) -> Path | None:
        """Return this rank's copy of a file, if it has one."""
        return self.copy_of(path) if path in self._copied else None

    def to_write(self, path: str, *, size: int = 0) -> Path:
        """Return where this rank is to write, the folder made.

        Args:
            path: What the script writes.
            size: The bytes that are there and stay; they are copied unless this rank has a copy.
        """
        copy = self.copy_of(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path not in self._copied:
            copy.unlink(missing_ok=True)
            if size:
                _copy_start(path, copy, size)
            self._copied.add(path)  # only now: what is copied would be read from there
        return copy

    def make_fifo(self, path: str) -> None:
        """Have a pipe of this rank's own beside rank 0's: both ends are in one process."""
        os.mkfifo(self.to_write(path))

    def forget(self, path: str) -> None:
        """Read what rank 0 has at a path, and beneath it, from now on."""
        for copied in [p for p in self._copied if p == path or p.startswith(path + os.sep)]:
            self._copied.remove(copied)
            with contextlib.suppress(OSError):
                self.copy_of(copied).unlink()

    def keep(self, path: str) -> None:
        """Have `forget_all` spare a path, which a library holds by name, as SQLite does."""
        self._in_use.add(path)

    def forget_all(self) -> None:
        """Read what rank 0 has of any file from now on."""
        for path in self._copied - self._in_use:
            self.forget(path)

    def move(self, source: str, target: str) -> None:
        """Have this rank's copy of a file, if there is one, at another path."""
        self.forget(target)
        if source in self._copied:
            self._copied.remove(source)
            self.copy_of(source).replace(self.to_write(target))

    def remove_own(self, path: str) -> None:
        """Remove a temporary file or folder, which rank 0 has moved away from among its own."""
        if self._rank and self.is_own(path) and not path.startswith(_SPECIAL):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def _copy_start(path: str, copy: Path, size: int) -> None:
    with Path(path).open("rb") as source, copy.open("wb") as target:
        while size > 0 and (piece := source.read(min(size, 1 << 20))):
            target.write(piece)
            size -= len(piece)
