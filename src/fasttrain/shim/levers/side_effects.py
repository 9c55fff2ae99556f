"""Has rank 0 alone leave something behind: checkpoints, TensorBoard's and wandb's runs.

What another rank saves is dropped, and where it loads a file that rank 0 writes in its stead, it
waits until that file is whole. What is printed comes from rank 0 already.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
from collections import Counter
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

_PASSING = ("pathlib.py", "contextlib.py")


class SideEffects:
    """Takes the place of what writes files."""

    def __init__(self, ledger: Ledger, ranks: Ranks, scratch: Path) -> None:
        self.ledger = ledger
        self._ranks = ranks
        self._scratch = scratch
        self._saves: Counter[str] = Counter()
        self._writing = False

    def install(self, undo: ExitStack) -> None:
        """Replace what saves; on rank 0 it only tells the others that a file is whole."""
        self.ledger.settle(State.ARMED, "nothing was saved")
        self.ledger.excuse(State.SKIPPED, "the script saved nothing")
        self._replace(torch, "save", self._save, undo)
        self._replace(torch, "load", self._load, undo)
        self._safetensors(undo)
        if self._ranks.rank == 0:
            return
        undo.callback(after_import("torch.utils.tensorboard.writer", self._quieten_tensorboard))
        os.environ.setdefault("WANDB_MODE", "disabled")
        self._replace(os, "mkdir", self._mkdir, undo)
        for module in (builtins, io):
            self._replace(module, "open", self._open, undo)
        for name in ("replace", "rename"):
            self._replace(os, name, self._rename, undo)

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
        path = _path_of(target)
        if not path:
            return original(what, target, *args, **kwargs)  # into memory
        self._saves[path] += 1
        count = self._saves[path]
        if self._ranks.rank:
            self.ledger.apply("left to rank 0", "")
            return None
        self._writing = True
        try:
            result = original(what, target, *args, **kwargs)
        finally:
            self._writing = False
        if not isinstance(target, str | os.PathLike):
            target.flush()
        self._ranks.store.set(f"saved/{path}/{count}", "")
        self.ledger.apply("saved", "")
        self.ledger.counts["files"] += 1
        return result

    def _load(self, original: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path_of(source)
        if self._ranks.rank and path and self._saves[path]:
            self._ranks.store.wait([f"saved/{path}/{self._saves[path]}"])
        return original(source, *args, **kwargs)

    # --- files that the script itself writes

    def _open(self, original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a rank's own copy of a file that rank 0 writes."""
        path = _path_of(file)
        if not path or not called_by_user(through=_PASSING):
            return original(file, mode, *args, **kwargs)
        copy = self._copy_of(path)
        if not set(mode) & set("wax+"):
            if self._saves[path]:
                self._ranks.store.wait([f"saved/{path}/{self._saves[path]}"])
            return original(copy if copy.exists() else file, mode, *args, **kwargs)
        if not Path(path).parent.is_dir() or path.startswith("/dev/"):
            return original(file, mode, *args, **kwargs)
        copy.parent.mkdir(parents=True, exist_ok=True)
        self.ledger.note(f"{path} is rank 0's: this rank writes a copy of its own")
        return original(copy, mode, *args, **kwargs)

    def _rename(self, original: Any, source: Any, target: Any, **kwargs: Any) -> None:
        old, new = _path_of(source), _path_of(target)
        if old and new and self._saves[old]:
            self._saves[new] += self._saves.pop(old)  # rank 0 renames what it has saved
            return
        if old and new and (copy := self._copy_of(old)).exists():
            moved = self._copy_of(new)
            moved.parent.mkdir(parents=True, exist_ok=True)
            original(copy, moved)
            return
        original(source, target, **kwargs)

    def _mkdir(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(path, *args, **kwargs)
        except FileExistsError:
            if not os.path.isdir(path):  # noqa: PTH112 - what is given may be a descriptor
                raise

    def _copy_of(self, path: str) -> Path:
        return self._scratch / path.lstrip(os.sep)

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
