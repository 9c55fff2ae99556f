"""The files that a rank other than 0 owns: copies of what it writes, and temporary files."""

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
    """Return the absolute path of a target; empty if it isn't a file with a name."""
    if hasattr(target, "name") and not isinstance(target, os.PathLike):
        target = target.name  # an open file
    if isinstance(target, bytes):
        target = os.fsdecode(target)
    if not target or not isinstance(target, str | os.PathLike):
        return ""
    return os.path.abspath(os.fsdecode(target))  # noqa: PTH100 - symlinks aren't resolved


class OwnCopies:
    """Knows the paths that are this rank's own.

    Args:
        rank: This rank; rank 0 writes where the script says.
        scratch: This rank's own folder.
    """

    def __init__(self, rank: int, scratch: Path) -> None:
        self._rank = rank
        self._scratch = scratch
        self._own: list[str] = [*_SPECIAL]
        folder, name = os.path.split(path_of(scratch))
        # The scratch folders of all ranks: each rank must classify a path alike.
        self._scratches = os.path.join(folder, "")  # noqa: PTH118
        self._scratch_name = re.compile(re.escape(name).replace(str(rank), r"\d+") + r"(/|$)")
        self._files: set[str] = set()
        self._copied: set[str] = set()
        self._in_use: set[str] = set()

    def install(self, undo: ExitStack) -> None:
        """Note temporary files and folders, whose names each rank draws for itself."""
        for name, folder_at, note in (
            ("mkdtemp", 2, self._note_folder),
            ("mktemp", 2, self._note_file),
            ("_mkstemp_inner", 0, self._note_descriptor),  # all other functions of tempfile call it
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
        """Return the folder for a temporary file: one that the script lists gets only rank 0's."""
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
        """True if each rank has its own file at an absolute path."""
        if path in self._files or self.is_scratch(path):
            return True
        return (path + os.sep).startswith(tuple(self._own))

    def is_scratch(self, path: str) -> bool:
        """True if a path is in a scratch folder of any rank."""
        ours = path.startswith(self._scratches)
        return ours and self._scratch_name.match(path, len(self._scratches)) is not None

    def copy_of(self, path: str) -> Path:
        """Return the path at which this rank writes instead of the script's path."""
        return self._scratch / path.lstrip(os.sep)

    def to_read(self, path: str) -> Path | None:
        """Return this rank's copy of a file; None if it has none."""
        return self.copy_of(path) if path in self._copied else None

    def to_write(self, path: str, *, size: int = 0) -> Path:
        """Return the path at which this rank writes; its folder is created.

        Args:
            path: The script's path.
            size: Number of bytes that are kept: copied from rank 0's file if there is no copy yet.
        """
        copy = self.copy_of(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path not in self._copied:
            copy.unlink(missing_ok=True)
            if size:
                _copy_start(path, copy, size)
            self._copied.add(path)  # only now: `_copy_start` has to read the original
        return copy

    def make_fifo(self, path: str) -> None:
        """Create this rank's own pipe: both of its ends are in one process."""
        os.mkfifo(self.to_write(path))

    def forget(self, path: str) -> None:
        """Delete the copies at a path and below it; rank 0's files are read from now on."""
        for copied in [p for p in self._copied if p == path or p.startswith(path + os.sep)]:
            self._copied.remove(copied)
            with contextlib.suppress(OSError):
                self.copy_of(copied).unlink()

    def keep(self, path: str) -> None:
        """Exclude a path from `forget_all`: a library such as SQLite goes on to use it by name."""
        self._in_use.add(path)

    def forget_all(self) -> None:
        """Delete the copies of all files; rank 0's files are read from now on."""
        for path in self._copied - self._in_use:
            self.forget(path)

    def move(self, source: str, target: str) -> None:
        """Move this rank's copy of a file, if any, to another path."""
        self.forget(target)
        if source in self._copied:
            self._copied.remove(source)
            self.copy_of(source).replace(self.to_write(target))

    def remove_own(self, path: str) -> None:
        """Remove this rank's temporary file or folder, since rank 0 has moved its own away."""
        if self._rank and self.is_own(path) and not path.startswith(_SPECIAL):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def _copy_start(path: str, copy: Path, size: int) -> None:
    with Path(path).open("rb") as source, copy.open("wb") as target:
        while size > 0 and (piece := source.read(min(size, 1 << 20))):
            target.write(piece)
            size -= len(piece)
