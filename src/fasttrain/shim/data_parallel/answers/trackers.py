"""Has rank 0 alone make runs of TensorBoard and wandb, whose folders and names all ranks see.

A script makes the paths of its logs and checkpoints from them, and has to make the same ones on all
ranks.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.files import Files
from fasttrain.shim.hooks import patching
from fasttrain.shim.process.import_hook import after_import

# What a script reads from a run of wandb to name its files.
# Source: https://docs.wandb.ai/ref/python/sdk/classes/run
_NAMES = ("dir", "id", "name")
_Call = Callable[..., Any]


class Trackers:
    """Replaces what makes the runs, once the script has imported it.

    Args:
        answers: Rank 0's answers.
        files: Tells the script's calls from those of libraries.
        scratch: This rank's own folder.
    """

    def __init__(self, answers: Answers, files: Files, scratch: Path) -> None:
        self._answers = answers
        self._files = files
        self._events = str(scratch / "tensorboard")
        self._shown: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._kinds: set[tuple[type, str]] = set()  # properties that are replaced

    def install(self, undo: ExitStack) -> None:
        """Replace the functions."""
        tensorboard = functools.partial(self._of_tensorboard, undo)
        undo.callback(after_import("torch.utils.tensorboard.writer", tensorboard))
        if self._answers.rank:
            # Whatever mode the user has chosen: only rank 0 may have a run.
            os.environ["WANDB_MODE"] = "disabled"
        undo.callback(after_import("wandb", functools.partial(self._of_wandb, undo)))

    # --- TensorBoard

    def _of_tensorboard(self, undo: ExitStack, module: Any) -> None:
        self._files.replace(module.SummaryWriter, "__init__", self._make_writer, undo)
        if self._answers.rank:
            self._files.replace(module.FileWriter, "__init__", self._write_apart, undo)

    def _make_writer(
        self,
        frame: FrameType | None,
        original: _Call,
        writer: Any,
        log_dir: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Have all ranks get an error, or rank 0's folder where torch names it, by the second."""
        make = functools.partial(original, writer)
        place = self._files.place_of(frame, "make a SummaryWriter", libraries=True)
        if not place:
            make(log_dir, *args, **kwargs)
        elif self._answers.rank:
            folder = self._answers.ask(place, lambda: None)
            make(log_dir or folder, *args, **kwargs)
        else:
            make = functools.partial(make, log_dir, *args, **kwargs)
            self._answers.ask(place, make, lambda _: str(writer.log_dir))

    def _write_apart(
        self,
        _: FrameType | None,
        original: _Call,
        writer: Any,
        log_dir: Any,  # noqa: ARG002 - rank 0's, by which the script may name it
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write this rank's events to its scratch folder."""
        original(writer, self._events, *args, **kwargs)

    # --- wandb

    def _of_wandb(self, undo: ExitStack, module: Any) -> None:
        start = self._start_disabled if self._answers.rank else self._start
        self._files.replace(module, "init", functools.partial(start, undo), undo)

    def _place(self, frame: FrameType | None) -> int:
        return self._files.place_of(frame, "start a run of wandb", libraries=True)

    def _start(
        self, _: ExitStack, frame: FrameType | None, original: _Call, *args: Any, **kwargs: Any
    ) -> Any:
        """Start rank 0's run; an error is one on all ranks."""
        start = functools.partial(original, *args, **kwargs)
        place = self._place(frame)
        return self._answers.ask(place, start, _names_of) if place else start()

    def _start_disabled(
        self, undo: ExitStack, frame: FrameType | None, original: _Call, *args: Any, **kwargs: Any
    ) -> Any:
        """Start a run that does nothing, and has the names of rank 0's."""
        place = self._place(frame)
        names = self._answers.ask(place, list) if place else []
        # The mode that a script passes has precedence over WANDB_MODE.
        run = original(*args, **{**kwargs, "mode": "disabled"})
        for name, value in zip(_NAMES, names, strict=False):
            self._show(run, name, value, undo)
        return run

    def _show(self, run: Any, name: str, value: Any, undo: ExitStack) -> None:
        try:
            setattr(run, name, value)
        except AttributeError:  # a property that can only be read
            kind = type(run)
            self._shown.setdefault(run, {})[name] = value
            if (kind, name) not in self._kinds:
                self._kinds.add((kind, name))
                patching.wrap(kind, name, functools.partial(self._property, name), undo)

    def _property(self, name: str, original: Any) -> Any:
        shown = self._shown

        def read(run: Any) -> Any:
            known = shown.get(run, {})
            return known[name] if name in known else original.__get__(run, type(run))

        return property(read)


def _names_of(run: Any) -> list[Any]:
    return [getattr(run, name, None) for name in _NAMES]
