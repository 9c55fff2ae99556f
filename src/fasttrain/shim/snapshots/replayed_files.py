"""Keeps files that an earlier run has written unchanged in a replay, and restores buffers.

A replayed loop would write weights that were never trained. So existing files are not written,
removed or renamed. If a file is gone, it is written all the same, since the script may read it
back; it is emptied after the replay, so that nobody takes it for the file that it replaces.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Filing
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.snapshots.files import refuse_diverged

Call = Callable[..., Any]
_SAFETENSORS = ("safetensors.torch", "safetensors.numpy")  # save_file calls serialize_file


class LeftFiles:
    """Replaces the functions that write, remove and rename files.

    Attributes:
        left: How many times a file was left unchanged.
    """

    def __init__(self) -> None:
        self.left = 0
        self._since_s = time.time()
        self._new: set[str] = set()  # paths at which the replay has created files
        self._saved: set[str] = set()  # paths to which it has saved weights
        self._nowhere: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def begin(self, undo: ExitStack) -> None:
        """Leave files unchanged until ``undo`` is closed."""
        scripted: Any = torch.jit
        saving = [(sys.modules[name], "serialize_file") for name in _SAFETENSORS if _there(name)]
        acts: list[tuple[Any, str, Call]] = [
            *((owner, name, self._save) for owner, name in saving),
            (torch, "save", self._save),
            (torch.jit, "save", self._save),
            (scripted.RecursiveScriptModule, "save", self._save),
            *((owner, "open", self._open) for owner in (builtins, io)),
            *((os, name, self._rename) for name in ("replace", "rename")),
            *((os, name, self._remove) for name in ("remove", "unlink")),
            (shutil, "rmtree", self._remove_tree),
        ]
        for owner, name, act in acts:
            patching.wrap(owner, name, functools.partial(_instead, act), undo, Filing.REPLAY)

    def end(self) -> list[str]:
        """Empty the files into which the replay has saved weights; return their paths.

        Raises:
            SystemExit: ``snapshot-open-file`` if a file is still open whose writes were dropped.
        """
        for file, path in self._nowhere.items():
            if not file.closed:
                refuse(_open_file(path))
        saved = sorted(path for path in self._saved if Path(path).is_file())
        for path in saved:
            os.truncate(path, 0)
        return saved

    # --- what the script calls

    def _save(self, original: Call, *args: Any, **kwargs: Any) -> Any:
        target = _target(args, kwargs)
        if isinstance(target, str | os.PathLike):
            if self._is_kept(path := _absolute(target)):
                return None
            self._saved.add(path)
        return original(*args, **kwargs)

    def _open(self, original: Call, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file; bytes written to an existing one go to /dev/null.

        Text is written as ever: it holds numbers, which are right in a replay, too.
        """
        writes = isinstance(mode, str) and "b" in mode and set(mode) & set("wxa")
        if not writes or isinstance(file, int) or _is_special(path := _absolute(file)):
            return original(file, mode, *args, **kwargs)
        if self._is_kept(path):
            opened = original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
            self._nowhere[opened] = path
            return opened
        return original(file, mode, *args, **kwargs)

    def _rename(self, original: Call, src: Any, dst: Any, **kwargs: Any) -> None:
        before, after = _absolute(src), _absolute(dst)
        if self._is_of_before(before):
            self.left += 1
        # Written to a temporary name and renamed, as is usual: the earlier file stays.
        elif self._made(before) and Path(after).exists() and not self._made(after):
            self.left += 1
            shutil.rmtree(before) if Path(before).is_dir() else Path(before).unlink()
        else:
            original(src, dst, **kwargs)
            for names in (self._new, self._saved):
                names |= {after + name.removeprefix(before) for name in _beneath(before, names)}

    def _remove(self, original: Call, path: Any, **kwargs: Any) -> None:
        if not kwargs and self._is_of_before(_absolute(path)):
            self.left += 1
        else:
            original(path, **kwargs)

    def _remove_tree(self, original: Call, path: Any, *args: Any, **kwargs: Any) -> None:
        if self._is_of_before(_absolute(path)):
            self.left += 1
        else:
            original(path, *args, **kwargs)

    # --- existing files

    def _is_kept(self, path: str) -> bool:
        """True if a file exists that this replay hasn't made; otherwise note it as the replay's."""
        if path not in self._new and Path(path).exists():
            self.left += 1
            return True
        self._new.add(path)
        return False

    def _is_of_before(self, path: str) -> bool:
        """True if a file, or one of those in a folder, is older than this process."""
        try:
            files = _files_in(path) if os.path.isdir(path) else [path]  # noqa: PTH112
            return any(
                file not in self._new and os.stat(file).st_mtime < self._since_s  # noqa: PTH116
                for file in files
            )
        except OSError:
            return False

    def _made(self, path: str) -> bool:
        return any(_beneath(path, self._new))


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


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the target argument of `torch.save`, `torch.jit.save` or safetensors."""
    return kwargs.get("f", kwargs.get("filename", args[1] if len(args) > 1 else None))


def _there(module: str) -> bool:
    return hasattr(sys.modules.get(module), "serialize_file")


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link stays one


def _files_in(folder: str) -> list[str]:
    return [str(Path(at, name)) for at, _, names in os.walk(folder) for name in names]


def _is_special(path: str) -> bool:
    return Path(path).exists() and not Path(path).is_file()


def _beneath(path: str, names: set[str]) -> list[str]:
    return [name for name in names if name == path or name.startswith(path + os.sep)]


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
