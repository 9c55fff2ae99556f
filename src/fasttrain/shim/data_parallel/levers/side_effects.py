"""Lets rank 0 alone write checkpoints and the runs of TensorBoard and wandb.

Other files that the script writes are in `fasttrain.shim.data_parallel.answers.files`. Output needs
nothing: only rank 0's is shown.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fasttrain.model.outcome import State
from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.commands import Commands
from fasttrain.shim.data_parallel.answers.files import Files
from fasttrain.shim.data_parallel.answers.own_copies import OwnCopies, path_of
from fasttrain.shim.data_parallel.answers.places import outside_of_torch
from fasttrain.shim.data_parallel.answers.process_identity import OwnNames, ProcessIdentity
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.split.lazy_rows import gather_in
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.outcome_recorder import Ledger
from fasttrain.shim.process.import_hook import after_import

LEFT = "left to rank 0"


class SideEffects:
    """Replaces the functions that write files, and what else a process has once.

    Args:
        ledger: This lever's ledger.
        ranks: All ranks.
        answers: Rank 0's answers, installed already.
        scratch: This rank's own folder.
    """

    def __init__(self, ledger: Ledger, ranks: Ranks, answers: Answers, scratch: Path) -> None:
        self.ledger = ledger
        self._ranks = ranks
        self._scratch = scratch
        self._copies = OwnCopies(ranks.rank, scratch)
        self._files = Files(answers, self._copies, ledger)
        self._commands = Commands(answers, self._files)
        self._identity = ProcessIdentity(answers)
        self._names = OwnNames(answers, self._copies)
        self._elsewhere: Counter[tuple[str, str]] = Counter()  # saves by thread and path

    def install(self, undo: ExitStack) -> None:
        """Replace what writes files, and what asks for them."""
        # Lives on, for what is replaced when the script imports it.
        undo = undo.enter_context(ExitStack())
        self.ledger.settle(State.ARMED, "nothing was saved")
        self.ledger.excuse(State.SKIPPED, "the script saved nothing")
        self._files.replace(torch, "save", self._save, undo)
        self._files.replace(torch.jit, "save", self._save, undo)
        self._safetensors(undo)
        self._copies.install(undo)
        self._files.install(undo)
        self._commands.install(undo)
        self._identity.install(undo)
        self._names.install(undo)
        if self._ranks.rank == 0:
            return
        quieten = functools.partial(self._quieten_tensorboard, undo)
        undo.callback(after_import("torch.utils.tensorboard.writer", quieten))
        # Whatever mode the user has chosen: only rank 0 may have a run.
        os.environ["WANDB_MODE"] = "disabled"
        undo.callback(after_import("wandb", functools.partial(self._disable_wandb, undo)))

    def refresh(self) -> None:
        """Do nothing: every file is counted as it is saved."""

    def _safetensors(self, undo: ExitStack) -> None:
        def replace(module: Any) -> None:
            self._files.replace(module, "save_file", self._save, undo)

        for name in ("safetensors.torch", "safetensors.numpy"):
            undo.callback(after_import(name, replace))

    # --- checkpoints

    def _save(
        self,
        frame: FrameType | None,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        save = functools.partial(original, *args, **kwargs)
        target = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        path = path_of(target) if isinstance(target, str | os.PathLike) else ""
        if not path:  # into memory, or an open file, which is a copy on other ranks
            return save()
        if self._copies.is_own(path):
            return save()
        if threading.current_thread() is threading.main_thread():
            gather_in(args)
        outside = outside_of_torch(frame) or frame
        if not self._files.leave(outside, "save a checkpoint", path, save):
            self._save_elsewhere(path, save)
        if self._ranks.rank:
            self.ledger.apply(LEFT, "")
        else:
            self.ledger.apply("saved", "")
            self.ledger.counts["files"] += 1
        return None

    def _save_elsewhere(self, path: str, save: Callable[[], Any]) -> None:
        """Save in one of the script's threads: the other ranks' threads wait for rank 0's."""
        thread = threading.current_thread().name
        self._elsewhere[thread, path] += 1
        key = f"saved/{thread}/{path}/{self._elsewhere[thread, path]}"
        store = self._ranks.store
        if self._ranks.rank == 0:
            try:
                save()
            finally:
                store.set(key, "")
        elif threading.current_thread() is not threading.main_thread():
            store.wait([key])
            self._copies.forget(path)

    # --- trackers

    def _disable_wandb(self, undo: ExitStack, module: Any) -> None:
        """Disable runs even if the script passes a mode, which has precedence over WANDB_MODE."""
        original = module.init

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{**kwargs, "mode": "disabled"})

        patching.put(module, "init", init, undo)

    def _quieten_tensorboard(self, undo: ExitStack, module: Any) -> None:
        """Write this rank's events to its scratch folder."""
        original = module.SummaryWriter.__init__
        scratch = str(self._scratch / "tensorboard")

        @functools.wraps(original)
        def __init__(writer: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807, ARG001
            original(writer, scratch, *args, **kwargs)

        patching.put(module.SummaryWriter, "__init__", __init__, undo)
