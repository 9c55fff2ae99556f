"""Leaves files to rank 0: it creates, changes and removes them, and answers what exists.

The other ranks wait at the same call until rank 0 has made it, and get its result or its error. Of
a file that the script opens to write, each of them writes its own copy.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import get_ident
from types import FrameType
from typing import Any, Self

from fasttrain.shim.data_parallel.answers.answers import Answers, itself
from fasttrain.shim.data_parallel.answers.clocks import replace_in_users_modules
from fasttrain.shim.data_parallel.answers.own_copies import OwnCopies, path_of
from fasttrain.shim.data_parallel.answers.places import asking
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.seams import Filing
from fasttrain.shim.process.import_hook import after_import


class DirEntry:
    """A file that `os.scandir` has found on rank 0, with the interface of `os.DirEntry`.

    Attributes:
        name: Its name.
        path: Its path, relative if the script has passed a relative folder.
    """

    def __init__(self, folder: str, name: str, kinds: list[bool], inode: int) -> None:
        self.name = name
        self.path = os.path.join(folder, name)  # noqa: PTH118
        self._kinds = kinds
        self._inode = inode

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """True if it is a folder."""
        return self._kinds[0 if follow_symlinks else 1]

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """True if it is a file."""
        return self._kinds[2 if follow_symlinks else 3]

    def is_symlink(self) -> bool:
        """True if it is a symbolic link."""
        return self._kinds[4]

    def is_junction(self) -> bool:
        """Return False: only Windows has junctions."""
        return False

    def inode(self) -> int:
        """Return its inode."""
        return self._inode

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return its present stat result."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)  # noqa: PTH116

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class DirEntries:
    """Iterates over entries, with the interface of `os.scandir`'s result."""

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
        """Stop the iteration."""
        self._entries = iter([])


def encoded_entries(entries: list[Any]) -> list[Any]:
    """Return rank 0's entries as plain values."""
    return [[entry.name, _kinds(entry), entry.inode()] for entry in entries]


def decoded_entries(folder: Any, rows: list[Any]) -> list[DirEntry]:
    """Return the entries that `encoded_entries` has encoded.

    Args:
        folder: The folder, as the script has passed it.
        rows: The encoded entries.
    """
    return [DirEntry(os.fspath(folder), *row) for row in rows]


def _kinds(entry: Any) -> list[bool]:
    follow = (True, False)
    folders = [entry.is_dir(follow_symlinks=links) for links in follow]
    files = [entry.is_file(follow_symlinks=links) for links in follow]
    return [*folders, *files, entry.is_symlink()]


Call = Callable[..., Any]
_QUESTIONS = ("stat", "lstat", "listdir", "access", "readlink", "statvfs")
# Functions that change files: the names of their arguments up to the one that is changed.
_OS_ACTS = {
    "mkdir": ("path",), "rmdir": ("path",), "remove": ("path",), "unlink": ("path",),
    "truncate": ("path",), "utime": ("path",), "chmod": ("path",), "chown": ("path",),
    "mkfifo": ("path",), "mknod": ("path",), "symlink": ("src", "dst"), "link": ("src", "dst"),
    "rename": ("src", "dst"), "replace": ("src", "dst"),
}  # fmt: skip
_SHUTIL_ACTS = {
    "rmtree": ("path",), "copyfile": ("src", "dst"), "copy": ("src", "dst"),
    "copy2": ("src", "dst"), "copytree": ("src", "dst"), "move": ("src", "dst"),
    "copymode": ("src", "dst"), "copystat": ("src", "dst"), "chown": ("path",),
    "make_archive": ("base_name",), "unpack_archive": ("filename", "extract_dir"),
}  # fmt: skip
# OpenCV writes a file unseen, in C++.
_OPENCV_ACTS = {"imwrite": ("filename",), "imwritemulti": ("filename",)}
# Modules of the standard library that keep `open` under another name.
_HOLDING_OPEN = {"bz2": "_builtin_open", "tarfile": "bltn_open"}
# What modules of dbm append to a database's name.
_DBM_SUFFIXES = ("", ".db", ".dir", ".pag")
_MOVING = ("rename", "replace", "move")
_REMOVING = ("remove", "unlink")
_KEEPING = ("mkdir", "utime", "chmod", "chown", "copymode", "copystat")
# Instead of a place's number: the call is this rank's own; or it is the script's, but comes in no
# fixed order, as from a thread.
_LOCAL, _LOOSE = 0, -1
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Files:
    """Replaces the functions of `os` and `shutil` that query and change files, and `open`.

    Args:
        answers: Rank 0's answers.
        copies: This rank's own copies and temporary files.
        recorder: The lever's recorder: nothing is replaced while it isn't live.
    """

    def __init__(self, answers: Answers, copies: OwnCopies, recorder: OutcomeRecorder) -> None:
        self._answers = answers
        self._copies = copies
        self._recorder = recorder
        self._others = answers.rank > 0
        self._replaced: dict[int, Any] = {}
        self._put: set[str] = set()  # paths at which libraries have put files, on each rank

    def install(self, undo: ExitStack) -> None:
        """Replace the functions."""
        for name in _QUESTIONS:
            self.replace(os, name, functools.partial(self._ask, name), undo)
        self.replace(os, "scandir", self._scandir, undo)
        for owner, acts in ((os, _OS_ACTS), (shutil, _SHUTIL_ACTS)):
            for name, names in acts.items():
                self.replace(owner, name, functools.partial(self._act, name, names), undo)
        self.replace(os, "open", self._os_open, undo)
        for module in (builtins, io):
            self.replace(module, "open", self._open, undo)
        for name, held in _HOLDING_OPEN.items():
            undo.callback(after_import(name, self._replacing(held, self._open, undo)))
        for name in ("sqlite3", "sqlite3.dbapi2"):
            undo.callback(after_import(name, self._replacing("connect", self._connect, undo)))
        for name in ("dbm.gnu", "dbm.ndbm"):
            undo.callback(after_import(name, self._replacing("open", self._open_dbm, undo)))
        undo.callback(after_import("cv2", functools.partial(self._replace_in_opencv, undo)))
        replace_in_users_modules(self._replaced, undo)

    def replace(self, owner: Any, name: str, act: Call, undo: ExitStack) -> None:
        """Replace a function by ``act``, which gets the calling frame and the original first."""
        original = getattr(owner, name, None)
        if original is None:
            return
        make = functools.partial(self._while_live, act)
        replaced = patching.wrap(owner, name, make, undo, Filing.RANKS)
        self._replaced[id(original)] = replaced
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if owner is os and original in able:
                able.add(replaced)
                undo.callback(able.discard, replaced)

    def _replace_in_opencv(self, undo: ExitStack, module: Any) -> None:
        if not hasattr(module, "__path__"):
            return  # the extension, which the package imports by its own name to copy from it
        for name, names in _OPENCV_ACTS.items():
            self.replace(module, name, functools.partial(self._act, name, names), undo)

    def _while_live(self, act: Call, original: Call) -> Call:
        recorder = self._recorder

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if not recorder.live:
                return original(*args, **kwargs)
            try:
                frame: FrameType | None = sys._getframe(1)
            except ValueError:
                frame = None  # called by the interpreter itself, as at its exit
            return act(frame, original, *args, **kwargs)

        return replaced

    def _replacing(self, name: str, act: Call, undo: ExitStack) -> Callable[[Any], None]:
        return lambda module: self.replace(module, name, act, undo)

    def _place(
        self, frame: FrameType | None, target: Any, doing: str, *, libraries: bool = False
    ) -> int:
        """Return the number of the place at which rank 0 answers, or `_LOCAL` or `_LOOSE`."""
        ordered = self._answers.live and get_ident() == self._answers.thread
        if not ordered and not self._others:
            return _LOCAL
        users = asking(frame, for_libraries=libraries)
        # The path is looked at last: it costs the most, and most calls come from libraries.
        by_nobody = users is None and frame is not None
        if by_nobody or not (path := path_of(target)) or self._copies.is_own(path):
            return _LOCAL
        if users is None:  # called by the interpreter on the script's behalf, as at its exit
            return _LOOSE if self._others else _LOCAL
        return self._answers.places.number(users, doing) if ordered else _LOOSE

    # --- questions

    def _ask(
        self,
        name: str,
        frame: FrameType | None,
        original: Call,
        path: Any = ".",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        by_name = kwargs.get("dir_fd") is None
        place = self._place(frame, path, f"call os.{name}") if by_name else _LOCAL
        if place > 0 and name == "listdir":
            return self._answers.ask(place, lambda: self._without_ours(path, original(path)))
        if place > 0:
            return self._answers.ask(place, lambda: original(path, *args, **kwargs))
        return original(path, *args, **kwargs)

    def _scandir(self, frame: FrameType | None, original: Call, path: Any = ".") -> Any:
        place = self._place(frame, path, "call os.scandir")
        if place <= 0 or isinstance(path, bytes):
            return original(path)

        def find() -> list[Any]:
            entries = list(original(path))
            left = self._without_ours(path, [entry.name for entry in entries])
            return [entry for entry in entries if entry.name in left]

        found = self._answers.ask(place, find, encoded_entries)
        return DirEntries(decoded_entries(path, found) if self._others else found)

    def _without_ours(self, folder: Any, names: list[Any]) -> list[Any]:
        """Return names without the ranks' scratch folders, which change while they are listed."""
        at = path_of(folder)
        return [n for n in names if not self._copies.is_scratch(f"{at}/{os.fsdecode(n)}")]

    # --- changes

    def _act(
        self,
        name: str,
        names: tuple[str, ...],
        frame: FrameType | None,
        original: Call,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = [*args[: len(names)], *[kwargs.get(one) for one in names[len(args) :]]]
        by_name = not any(isinstance(value, int) and key.endswith("dir_fd")
                          for key, value in kwargs.items())  # fmt: skip
        target = path_of("." if given[-1] is None else given[-1]) if by_name else ""
        place = self._place(frame, target, f"call {name}")
        if place == _LOCAL:
            return self._by_each(name, target, functools.partial(original, *args, **kwargs))
        if name in _REMOVING:
            self._put.discard(target)
        if place == _LOOSE:
            self._follow_loosely(name, path_of(given[0]), target)
            if name in _OPENCV_ACTS:
                return True
            return given[-1] if name in _SHUTIL_ACTS else None  # most of these return their target
        result = self._answers.do(place, lambda: original(*args, **kwargs), itself)
        if self._others:
            self._follow(name, path_of(given[0]), target)
        return result

    def _by_each(self, name: str, target: str, change: Call) -> Any:
        """Make a library's change on this rank: another one may have removed the file already."""
        try:
            result = change()
        except FileNotFoundError:
            if name not in _REMOVING or target not in self._put:
                raise
            result = None
        if name in _MOVING:
            self._put.add(target)
        elif name in _REMOVING:
            self._put.discard(target)
        return result

    def note_put(self, path: str) -> None:
        """Note a file of rank 0's that libraries may remove on each rank."""
        self._put.add(path)

    def _follow(self, name: str, source: str, target: str) -> None:
        """Drop this rank's copies of a file that rank 0 has changed."""
        if name in _KEEPING:
            return
        self._copies.forget(target)
        if name == "mkfifo":
            self._copies.make_fifo(target)
        if name in _MOVING:
            self._copies.forget(source)
            self._copies.remove_own(source)

    def _follow_loosely(self, name: str, source: str, target: str) -> None:
        """Apply a thread's change to this rank's copies; rank 0's thread changes the files."""
        if name in _MOVING:
            self._copies.move(source, target)
        elif name not in _KEEPING:
            self._copies.forget(target)

    def place_of(self, frame: FrameType | None, doing: str, *, libraries: bool = False) -> int:
        """Return the number of the script's place at which rank 0 answers; 0 if there is none.

        Args:
            frame: The caller of the replaced function.
            doing: What is done, in words.
            libraries: Count a library's call as that of the script's line which has called it.
        """
        answers = self._answers.answers()
        users = asking(frame, for_libraries=libraries) if answers else None
        return 0 if users is None else self._answers.places.number(users, doing)

    def forget_copies(self) -> None:
        """Read rank 0's files from now on, instead of this rank's copies."""
        self._copies.forget_all()

    def leave(self, frame: FrameType | None, doing: str, path: str, act: Callable[[], Any]) -> bool:
        """Have rank 0 alone write a file once all ranks have come here.

        Args:
            frame: The nearest frame outside of torch, if any.
            doing: What is done, in words.
            path: The file.
            act: Writes it on rank 0.

        Returns:
            False in a thread or a child process, whose calls come in another order on each rank.
        """
        if frame is None or not self._answers.answers():
            return False
        self._answers.do(self._answers.places.number(frame, doing), act)
        if self._others:
            self._copies.forget(path)
        return True

    # --- files that the script itself opens

    def _open(
        self,
        frame: FrameType | None,
        original: Call,
        file: Any,
        mode: str = "r",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        path = path_of(file) if not isinstance(file, int) else ""
        flags = set(mode) if isinstance(mode, str) else set()
        writes, kept = bool(flags & set("wax+")), not flags & set("wx")
        place = self._place(frame, path, "open a file to write" if writes else "open a file")
        opening = functools.partial(self._opened, original, path, kept, (mode, *args), kwargs)
        if not writes:
            return self._read(place, path, file, opening)
        return self._write(place, path, file, opening, in_place=kept and "a" not in flags)

    def _os_open(
        self,
        frame: FrameType | None,
        original: Call,
        path: Any,
        flags: int,
        mode: int = 0o777,
        *,
        dir_fd: int | None = None,
    ) -> int:
        if dir_fd is not None or flags & os.O_DIRECTORY:
            return int(original(path, flags, mode, dir_fd=dir_fd))
        name, writes, kept = path_of(path), bool(flags & _WRITES), not flags & os.O_TRUNC
        place = self._place(frame, name, "open a file to write" if writes else "open a file")
        if writes and place and self._others:
            flags = (flags | os.O_CREAT) & ~os.O_EXCL
        opening = functools.partial(self._opened, original, name, kept, (flags, mode), {})
        if not writes:
            return int(self._read(place, name, path, opening))
        in_place = kept and not flags & os.O_APPEND
        return int(self._write(place, name, path, opening, in_place=in_place))

    def _connect(
        self, frame: FrameType | None, original: Call, database: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Open this rank's own copy of a database: SQLite opens files itself, in C."""
        by_path = database != ":memory:" and not kwargs.get("uri")
        path, kept = path_of(database) if by_path else "", True
        place = self._place(frame, path, "open a database", libraries=True)
        opening = functools.partial(self._opened, original, path, kept, args, kwargs)
        self._copies.keep(path)
        return self._write(place, path, database, opening, in_place=True)

    def _open_dbm(self, frame: FrameType | None, original: Call, file: Any, *args: Any) -> Any:
        """Open this rank's own copy of a database: these modules of dbm open files in C."""
        path = path_of(file)
        place = self._place(frame, path, "open a database", libraries=True)
        if place == _LOCAL:
            return original(file, *args)
        copy = self._copies.copy_of(path)
        if self._others:
            copy.parent.mkdir(parents=True, exist_ok=True)
            for each in filter(os.path.exists, (path + suffix for suffix in _DBM_SUFFIXES)):
                self._copies.to_write(each, size=os.stat(each).st_size)  # noqa: PTH116
                self._copies.keep(each)
        if place > 0:
            self._answers.do(place, _nothing)  # rank 0 opens its files once the others have copies
        if not self._others:
            return original(file, *args)
        self._recorder.note(f"{path} is rank 0's: this rank writes its own copy")
        with self._answers.apart():
            return original(str(copy), *args)

    def _opened(
        self, original: Call, path: str, kept: bool, args: Any, kwargs: Any, file: Any
    ) -> tuple[Any, int]:
        """Open a file; return it with the number of its bytes that are kept."""
        try:
            size = os.stat(path).st_size if kept and path else 0  # noqa: PTH116
        except OSError:
            size = 0
        return original(file, *args, **kwargs), size

    def _read(self, place: int, path: str, file: Any, opening: Call) -> Any:
        if place > 0:
            opened = self._answers.ask(place, lambda: opening(file), _nothing)
            if not self._others:
                return opened[0]
        copy = self._copies.to_read(path) if self._others else None
        with self._answers.apart():  # an opener may be the user's code
            return opening(file if copy is None else copy)[0]

    def _write(self, place: int, path: str, file: Any, opening: Call, *, in_place: bool) -> Any:
        if place == _LOCAL:
            return opening(file)[0]
        size = 0
        if place > 0:
            found = self._answers.do(place, lambda: opening(file), _size)
            if not self._others:
                if in_place:  # wait until the others have copied the content, before it changes
                    self._answers.do(place, _nothing)
                return found[0]
            size = int(found)
        copy = self._copies.to_write(path, size=size)
        if place > 0 and in_place:
            self._answers.do(place, _nothing)
        self._recorder.note(f"{path} is rank 0's: this rank writes its own copy")
        with self._answers.apart():
            return opening(copy)[0]


def _nothing(*_: Any) -> None:
    return None


def _size(opened: tuple[Any, int]) -> int:
    return opened[1]
