"""Has rank 0 alone leave something behind: checkpoints, TensorBoard's and wandb's runs.

What another rank saves is dropped, and where it loads a file that rank 0 writes in its stead, it
waits until that file is whole. What is printed comes from rank 0 already.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fasttrain.shim.callsite import called_by_user
from fasttrain.shim.import_hook import after_import
from fasttrain.shim.ledger import Ledger
from fasttrain.shim.ranks import Ranks
from fasttrain.spec.outcome import State

# What passes on what the script asks for; what other libraries write is theirs.
_PASSING = (
    "pathlib.py", "contextlib.py", f"{os.sep}os.py", "shutil.py", "<frozen os>",
    "logging/__init__.py", "logging/handlers.py",
)  # fmt: skip
_INSTALLED = tuple(
    os.path.join(path, "")  # noqa: PTH118
    for path in map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
)
DIRECTORY_S = 10.0  # for rank 0 to make a directory


class SideEffects:
    """Takes the place of what writes files."""

    def __init__(self, ledger: Ledger, ranks: Ranks, scratch: Path) -> None:
        self.ledger = ledger
        self._ranks = ranks
        self._scratch = scratch
        self._saved = 0  # files that this rank has saved or would have
        self._numbers: dict[str, int] = {}  # of the last one at each path
        self._directories: list[str] = []  # temporary ones, each rank's own

    def install(self, undo: ExitStack) -> None:
        """Replace what saves; on rank 0 it only tells the others that a file is whole."""
        self.ledger.settle(State.ARMED, "nothing was saved")
        self.ledger.excuse(State.SKIPPED, "the script saved nothing")
        self._replace(torch, "save", self._save, undo)
        self._replace(torch, "load", self._load, undo)
        self._safetensors(undo)
        self._replace(tempfile, "mkdtemp", self._mkdtemp, undo)
        for name in ("replace", "rename"):
            self._replace(os, name, self._rename if self._ranks.rank else self._renamed, undo)
        if self._ranks.rank == 0:
            return
        for owner, name in ((os, "remove"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
            self._replace(owner, name, self._remove, undo)
        undo.callback(after_import("torch.utils.tensorboard.writer", self._quieten_tensorboard))
        # Whatever mode the user chose, rank 0's run is the only one.
        os.environ["WANDB_MODE"] = "disabled"
        undo.callback(after_import("wandb", self._disable_wandb))
        self._replace(os, "mkdir", self._mkdir, undo)
        for module in (builtins, io):
            self._replace(module, "open", self._open, undo)

    def refresh(self) -> None:
        """Nothing is pending: every file is counted as it is saved."""

    def _replace(self, owner: Any, name: str, act: Callable[..., Any], undo: ExitStack) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if not self.ledger.live:
                return original(*args, **kwargs)
            return act(original, *args, **kwargs)

        undo.callback(setattr, owner, name, original)
        setattr(owner, name, replaced)

    def _safetensors(self, undo: ExitStack) -> None:
        def replace(module: Any) -> None:
            self._replace(module, "save_file", self._save, undo)

        for name in ("safetensors.torch", "safetensors.numpy"):
            undo.callback(after_import(name, replace))

    # --- checkpoints

    def _save(self, original: Any, what: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path_of(target) if isinstance(target, str | os.PathLike) else ""
        if not path:  # into memory, or a file that was opened, of which other ranks have a copy
            return original(what, target, *args, **kwargs)
        if self._is_own(path):
            return original(what, target, *args, **kwargs)
        self._saved += 1
        self._numbers[path] = self._saved
        if self._ranks.rank:
            self.ledger.apply("left to rank 0", "")
            return None
        result = original(what, target, *args, **kwargs)
        self._ranks.store.set(f"saved/{self._saved}", path)
        self.ledger.apply("saved", "")
        self.ledger.counts["files"] += 1
        return result

    def _load(self, original: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path_of(source)
        if self._ranks.rank and path in self._numbers:
            saved = self._saved_by_rank_0(path)
            source = path if Path(path).exists() or not saved else saved
        return original(source, *args, **kwargs)

    def _is_own(self, path: str) -> bool:
        """Whether a path is in a temporary directory that this rank has made for itself."""
        return path.startswith(tuple(self._directories))

    def _mkdtemp(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        self._directories.append(os.path.join(os.path.abspath(os.fsdecode(made)), ""))  # noqa: PTH100, PTH118
        return made

    def _saved_by_rank_0(self, path: str) -> str:
        """Wait until rank 0 has saved what this rank would have, and give where it did."""
        with self._ranks.waits():
            where: bytes = self._ranks.store.get(f"saved/{self._numbers[path]}")
        return where.decode()

    # --- files that the script itself writes

    def _open(self, original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a rank's own copy of a file that rank 0 writes."""
        path = _path_of(file)
        if not path or self._is_own(path) or not called_by_user(through=_PASSING, past=_INSTALLED):
            return original(file, mode, *args, **kwargs)
        copy = self._copy_of(path)
        if not set(mode) & set("wax+"):
            if path in self._numbers:
                saved = self._saved_by_rank_0(path)
                return original(saved if Path(saved).exists() else file, mode, *args, **kwargs)
            return original(copy if copy.exists() else file, mode, *args, **kwargs)
        if path.startswith("/dev/"):
            return original(file, mode, *args, **kwargs)
        copy.parent.mkdir(parents=True, exist_ok=True)
        self.ledger.note(f"{path} is rank 0's: this rank writes a copy of its own")
        return original(copy, mode, *args, **kwargs)

    def _rename(self, original: Any, source: Any, target: Any, **kwargs: Any) -> None:
        old, new = _path_of(source), _path_of(target)
        if old in self._numbers:
            # Rank 0 renames what it has saved: what is loaded by the new name comes after that.
            self._numbers[new] = self._numbers.pop(old)
            with self._ranks.waits():
                self._ranks.store.wait([f"renamed/{self._numbers[new]}"])
        elif old and (copy := self._copy_of(old)).exists():
            moved = self._copy_of(new)
            moved.parent.mkdir(parents=True, exist_ok=True)
            original(copy, moved)
        else:
            original(source, target, **kwargs)

    def _renamed(self, original: Any, source: Any, target: Any, **kwargs: Any) -> None:
        """Rename on rank 0, and tell the others of a file that was saved."""
        old, new = _path_of(source), _path_of(target)
        original(source, target, **kwargs)
        if old in self._numbers:
            self._numbers[new] = number = self._numbers.pop(old)
            self._ranks.store.set(f"saved/{number}", new)
            self._ranks.store.set(f"renamed/{number}", "")

    def _remove(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Remove this rank's own copy; what rank 0 has written is rank 0's to remove."""
        name = _path_of(path)
        if not name or self._is_own(name) or not called_by_user(through=_PASSING, past=_INSTALLED):
            original(path, *args, **kwargs)
            return
        self._numbers.pop(name, None)
        copy = self._copy_of(name)
        if copy.exists():
            original(copy, *args, **kwargs)

    def _mkdir(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Leave a directory to rank 0, which is to make it at the same place of the script."""
        name = _path_of(path)
        if not name or self._is_own(name) or not called_by_user(through=_PASSING, past=_INSTALLED):
            original(path, *args, **kwargs)
            return
        deadline = time.monotonic() + DIRECTORY_S
        while not Path(name).is_dir() and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(FileExistsError):
            original(path, *args, **kwargs)

    def _copy_of(self, path: str) -> Path:
        return self._scratch / path.lstrip(os.sep)

    def _disable_wandb(self, module: Any) -> None:
        """Disable runs whose mode the script itself chooses, which counts before WANDB_MODE."""
        original = module.init

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{**kwargs, "mode": "disabled"})

        module.init = init

    def _quieten_tensorboard(self, module: Any) -> None:
        """Send the other ranks' events to where they disturb nobody."""
        original = module.SummaryWriter.__init__
        scratch = str(self._scratch / "tensorboard")

        @functools.wraps(original)
        def __init__(writer: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807, ARG001
            original(writer, scratch, *args, **kwargs)

        module.SummaryWriter.__init__ = __init__


def _path_of(target: Any) -> str:
    """Give the absolute path of what is written or read; empty for what is no file by name."""
    if hasattr(target, "name") and not isinstance(target, os.PathLike):
        target = target.name  # an open file
    if isinstance(target, bytes):
        target = os.fsdecode(target)
    if not isinstance(target, str | os.PathLike):
        return ""
    return os.path.abspath(os.fspath(target))  # noqa: PTH100 - symlinks stay as they are named
