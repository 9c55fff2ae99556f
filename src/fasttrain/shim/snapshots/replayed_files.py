"""Keeps files that an earlier run has written unchanged in a replay, and restores buffers.

A replayed loop would write weights that were never trained. So existing files are not written,
removed or renamed. If a file is not there, it is written all the same, since the script may read it
back; after the replay it is given the content of the file that it stands for (see `saved_files`).
Text is written as ever, since the numbers in it are right. What is appended to a file that the
earlier run has appended to is cut off after the replay.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Filing
from fasttrain.shim.process.callsite import is_own_file
from fasttrain.shim.process.import_hook import after_import
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.snapshots.files import log, refuse_diverged
from fasttrain.shim.snapshots.saved_files import SavedFiles, beneath

Call = Callable[..., Any]
# Modules whose functions write a file themselves, not by `open`.
_SAVING_MODULES = {
    "safetensors.torch": "serialize_file",  # save_file calls it
    "safetensors.numpy": "serialize_file",
    "torch.export": "save",
}
_PATHLIB = ("pathlib.py", "pathlib/__init__.py", "pathlib/_local.py")


class LeftFiles:
    """Replaces the functions that write, remove and rename files.

    Args:
        saved: Told of all of them, in a replay and otherwise.

    Attributes:
        left: How many times a file was left unchanged.
    """

    def __init__(self, saved: SavedFiles) -> None:
        self.left = 0
        self._saved = saved
        self._replaying = self._trained = False
        self._since_s = time.time()
        self._new: set[str] = set()  # paths at which this process has created files
        self._made: set[str] = set()  # paths to which the replay has saved
        self._folders: set[str] = set()  # those that the replay has made, or would have
        self._opened: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # Sizes that files had when this process first opened them to append.
        self._appended: dict[str, int] = {}
        self._appending: weakref.WeakSet[Any] = weakref.WeakSet()  # what it has opened so
        self._then: dict[str, int] = {}  # their sizes at the snapshot
        self._after = Path()  # folder for what was appended after the snapshot
        self._within = threading.local()  # one of these functions may call another

    def install(self, undo: ExitStack) -> None:
        """Replace the functions."""
        scripted: Any = torch.jit
        acts: list[tuple[Any, str, Call]] = [
            (torch, "save", self._save),
            (torch.jit, "save", self._save),
            (scripted.RecursiveScriptModule, "save", self._save),
            (scripted.ScriptModule, "save", self._save),  # of a traced model
            *((owner, "open", self._open) for owner in (builtins, io)),
            *((os, name, self._rename) for name in ("replace", "rename")),
            *((os, name, self._remove) for name in ("remove", "unlink")),
            *((os, name, self._link) for name in ("link", "symlink")),
            (os, "mkdir", self._make_folder),
            (shutil, "rmtree", self._remove),
        ]
        for owner, name, act in acts:
            self._wrap(owner, name, act, undo)
        for name, function in _SAVING_MODULES.items():
            wrap = functools.partial(self._wrap_function, function, undo)
            undo.callback(after_import(name, wrap))

    def _wrap(self, owner: Any, name: str, act: Call, undo: ExitStack) -> None:
        make = functools.partial(self._outermost, act)
        patching.wrap(owner, name, make, undo, Filing.REPLAY)

    def _wrap_function(self, function: str, undo: ExitStack, module: Any) -> None:
        if hasattr(module, function):
            self._wrap(module, function, self._save, undo)

    def _outermost(self, act: Call, original: Call) -> Call:
        within = self._within

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if getattr(within, "flag", False) or _is_ours(sys._getframe(1)):
                return original(*args, **kwargs)
            within.flag = True
            try:
                return act(original, *args, **kwargs)
            finally:
                within.flag = False

        return stand_in

    def begin(self, undo: ExitStack) -> None:
        """Leave files unchanged until ``undo`` is closed."""
        self._replaying = True
        undo.callback(self._end_replay)

    def _end_replay(self) -> None:
        self._replaying = False

    def need(self, appended: dict[str, int], after: Path) -> None:
        """At the end of the replay, cut appended files back to what they held at the snapshot.

        Args:
            appended: What `appended` returned for the snapshot.
            after: Folder to keep what was appended later.
        """
        self._then, self._after = appended, after

    def appended(self) -> dict[str, int]:
        """Return the present sizes of the files that this process has opened to append."""
        self._flush()
        return {path: _size(path) for path in self._appended if Path(path).is_file()}

    def begin_training(self) -> None:
        """From now on the script overwrites what an earlier step has saved, as it wants to."""
        self._trained = True

    def end(self) -> list[str]:
        """Put back what the replay has saved; return those files that have another name now.

        Raises:
            SystemExit: ``snapshot-open-file`` if a file is still open whose writes were dropped,
                ``snapshot-files`` if what a file should hold is gone or can't be known.
        """
        for file, path in self._opened.items():
            if not file.closed:
                refuse(_open_file(path))
        renamed = self._saved.put_back(self._made)
        if self._saved.acts:
            self._cut_back()
        return renamed

    def _cut_back(self) -> None:
        """Cut off what was appended in the replay, and before it but after the snapshot.

        A file that was shorter when this process opened it was truncated: the replay has written
        all of it.
        """
        self._flush()
        for number, (path, size) in enumerate(self._then.items()):
            before = self._appended.get(path, -1)
            if before > size:  # the rows of steps that were lost, or another process's
                after = self._after / f"{number}-{Path(path).name}"
                after.parent.mkdir(mode=0o700, exist_ok=True)
                after.write_bytes(Path(path).read_bytes()[size:before])
                log(f"{path} is cut back to the snapshot; what was appended later is in {after}")
            if before >= size and _size(path) > size:
                os.truncate(path, size)

    def _forget_appended(self, path: str) -> None:
        """Forget files that the script has truncated."""
        for one in beneath(path, self._appended):
            del self._appended[one]

    def _flush(self) -> None:
        for file in list(self._appending):
            with suppress(OSError, ValueError):  # a full disk, or a file that is closed
                file.flush()

    # --- what the script calls

    def _save(self, original: Call, *args: Any, **kwargs: Any) -> Any:
        target = _target(args, kwargs)
        if isinstance(target, str | os.PathLike) and self._is_kept(_absolute(target)):
            return None
        return original(*args, **kwargs)

    def _open(self, original: Call, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file; in a replay, bytes written to an existing one go to /dev/null.

        Text is written as ever: it holds numbers, which are right in a replay, too.
        """
        writes = isinstance(mode, str) and set(mode) & set("wxa")
        if not writes or isinstance(file, int) or _is_special(path := _absolute(file)):
            return original(file, mode, *args, **kwargs)
        appends, before = "a" in mode, _size(path)
        if "b" not in mode:
            opened = original(file, mode, *args, **kwargs)
            if not appends:
                self._forget_appended(path)
        elif self._is_kept(path, appends=appends):
            opened = original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
        else:
            opened = original(file, mode, *args, **kwargs)
        if appends:
            self._appended.setdefault(path, before)
            self._appending.add(opened)
        if self._replaying and "b" in mode:
            self._opened[opened] = path
        return opened

    def _rename(self, original: Call, src: Any, dst: Any, **kwargs: Any) -> None:
        if kwargs:  # relative to open folders
            original(src, dst, **kwargs)
            return
        before, after = _absolute(src), _absolute(dst)
        if self._replaying and self._is_of_before(before):
            self.left += 1
        # Written to a temporary name and renamed, as is usual: the earlier file stays.
        elif self._replaying and Path(after).exists() and not any(beneath(after, self._new)):
            self.left += 1
            shutil.rmtree(before) if Path(before).is_dir() else Path(before).unlink()
        else:
            self._saved.keep(before)
            if not self._trained:
                self._saved.keep(after)
            original(src, dst)
            self._forget_appended(before)
            self._new |= {after + name.removeprefix(before) for name in beneath(before, self._new)}
            self._new.add(after)
            if self._replaying:  # also what was written unseen, as by tempfile
                self._made |= {
                    after + name.removeprefix(before)
                    for name in beneath(before, self._made) or [before]
                }
        self._saved.rename(before, after)

    def _remove(self, original: Call, path: Any, *args: Any, **kwargs: Any) -> None:
        by_name = isinstance(path, str | bytes | os.PathLike) and "dir_fd" not in kwargs
        if not by_name:
            original(path, *args, **kwargs)
            return
        at = _absolute(path)
        if self._replaying and self._is_of_before(at):
            self.left += 1
        else:
            self._saved.keep(at)
            original(path, *args, **kwargs)
            self._forget_appended(at)
        self._saved.remove(at)

    def _link(self, original: Call, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        path = _absolute(dst)
        if self._replaying and path not in self._new and os.path.lexists(path):
            self.left += 1
        else:
            original(src, dst, *args, **kwargs)
            self._new.add(path)
            if self._replaying and not Path(path).is_symlink():
                self._made.add(path)
        if not Path(path).is_symlink():
            self._saved.save(path)

    def _make_folder(self, original: Call, path: Any, *args: Any, **kwargs: Any) -> None:
        at = _absolute(path)
        try:
            original(path, *args, **kwargs)
        except FileExistsError:
            if not self._replaying or at in self._folders:
                raise
            self.left += 1  # it was made by this very call then
        if self._replaying:
            self._folders.add(at)

    # --- existing files

    def _is_kept(self, path: str, *, appends: bool = False) -> bool:
        """True if a file is not to be written; note it as the script's in any case."""
        self._saved.save(path)
        own = self._made if appends else self._new
        if self._replaying and path not in own and Path(path).exists():
            self.left += 1
            return True
        if not self._trained and not appends:
            self._saved.keep(path, overwritten=not self._replaying)
        self._new.add(path)
        if self._replaying:
            self._made.add(path)
        return False

    def _is_of_before(self, path: str) -> bool:
        """True if a file, or one of those in a folder, is older than this process."""
        try:
            files = _files_in(path) if os.path.isdir(path) else [path]  # noqa: PTH112
            return any(
                file not in self._new
                and (self._appended.get(file) or os.lstat(file).st_mtime < self._since_s)
                for file in files
            )
        except OSError:
            return False


class Buffers:
    """Buffers in memory that the script saves into, such as the best model so far."""

    def __init__(self) -> None:
        self._kept: list[weakref.ref[io.BytesIO]] = []

    def install(self, undo: ExitStack) -> None:
        """Track calls of `torch.save`."""

        def save(original: Call, *args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            target = _target(args, kwargs)
            if isinstance(target, io.BytesIO) and target not in self._living():
                self._kept.append(weakref.ref(target, self._kept.remove))

        make = functools.partial(_instead, save)
        patching.wrap(torch, "save", make, undo, Filing.SNAPSHOTS)

    def state(self) -> list[tuple[bytes, int]]:
        """Return the content and the position of each living buffer."""
        return [(buffer.getvalue(), buffer.tell()) for buffer in self._living()]

    def restore(self, saved: list[tuple[bytes, int]]) -> None:
        """Write saved contents into the present buffers.

        Raises:
            SystemExit: ``snapshot-diverged`` if their number differs.
        """
        living = list(self._living())
        if len(living) != len(saved):
            refuse_diverged(f"it has saved into {len(living)} buffers, not {len(saved)}")
        for buffer, (content, place) in zip(living, saved, strict=True):
            buffer.seek(0)
            buffer.truncate()
            buffer.write(content)
            buffer.seek(place)

    def _living(self) -> Iterator[io.BytesIO]:
        for ref in list(self._kept):
            buffer = ref()
            if buffer is not None and not buffer.closed:
                yield buffer


def _open_file(path: str) -> FasttrainError:
    return FasttrainError(
        "the run can't go on from its snapshot",
        why=f"it writes bytes to {path}, which it opened before the snapshot and still has open",
        fix="open such a file again for each epoch, or use --preempt signal and the script's own"
        " checkpoints",
        slug="snapshot-open-file",
    )


def _instead(act: Call, original: Call) -> Call:
    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return act(original, *args, **kwargs)

    return stand_in


def _is_ours(frame: FrameType | None) -> bool:
    """True if fasttrain itself asks, as to write its reports."""
    while frame is not None and frame.f_code.co_filename.endswith(_PATHLIB):
        frame = frame.f_back
    return frame is not None and is_own_file(frame.f_code.co_filename)


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the target argument of `torch.save`, or of what else saves."""
    return kwargs.get("f", kwargs.get("filename", args[1] if len(args) > 1 else None))


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link stays one


def _files_in(folder: str) -> list[str]:
    return [str(Path(at, name)) for at, _, names in os.walk(folder) for name in names]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0


def _is_special(path: str) -> bool:
    return Path(path).exists() and not Path(path).is_file()


class OwnCheckpoints:
    """Refuses a script that resumes from its own checkpoint: a replay starts from the beginning.

    What the script loads before its first step must not be newer than the first run's first step.

    Attributes:
        since_s: Time of the run's first step, in seconds since the epoch of `time.time`; 0 before.
    """

    def __init__(self) -> None:
        self.since_s = 0.0
        self._looking = ExitStack()

    def look_out(self, since_s: float, undo: ExitStack) -> None:
        """Refuse, up to this run's first step, to load files newer than the first run's first step.

        Older ones are data that the script prepared before training: these are still the same.
        """
        self.since_s = since_s
        undo.callback(self._looking.close)
        patching.wrap(torch, "load", self._checked, self._looking)

    def _checked(self, original: Any) -> Any:
        own = self

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            own._check(kwargs.get("f", args[0] if args else None))
            return original(*args, **kwargs)

        return load

    def begin(self) -> None:
        """Note the time of the first step; from now on the script saves what it has trained."""
        self.since_s = self.since_s or time.time()
        self._looking.close()

    def _check(self, source: Any) -> None:
        path = source if isinstance(source, str | os.PathLike) else getattr(source, "name", None)
        try:
            changed_s = os.stat(path).st_mtime if path is not None else 0.0  # noqa: PTH116
        except (OSError, TypeError, ValueError):
            return  # not a file, or torch.load will raise
        if changed_s > self.since_s:
            refuse(_goes_on_itself(str(path)))


def _goes_on_itself(path: str) -> FasttrainError:
    return FasttrainError(
        "the run can't go on from its snapshot",
        why=f"before its first step the script loads {path}, which was saved after the first step"
        " of this run: it resumes from its own checkpoint, and must start from the beginning",
        fix="use --preempt signal with such a script, or move its checkpoint away",
        slug="snapshot-checkpoint",
    )
