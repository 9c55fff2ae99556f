"""Knows a script that goes on from its own checkpoint, where a replay has to begin anew."""

from __future__ import annotations

import functools
import os
import time
from contextlib import ExitStack
from typing import Any

import torch

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.process.refusal import refuse

_LOAD = "load"  # of torch; the script calls it, and nothing here does


class OwnCheckpoints:
    """What the script loads before its first step must be as old as that step.

    Attributes:
        since_s: When the run made its first step, in seconds of the time of day; 0 before.
    """

    def __init__(self) -> None:
        self.since_s = 0.0
        self._looking = ExitStack()

    def look_out(self, since_s: float, undo: ExitStack) -> None:
        """Refuse, up to the first step, to load what was saved behind that of the run before.

        Data that the script has prepared and saved before it are the same as then.
        """
        self.since_s = since_s
        original, own = vars(torch)[_LOAD], self

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            own._check(kwargs.get("f", args[0] if args else None))
            return original(*args, **kwargs)

        undo.callback(self._looking.close)
        self._looking.callback(setattr, torch, _LOAD, original)
        setattr(torch, _LOAD, load)

    def begin(self) -> None:
        """The first step is made: from now on the script saves what it has trained."""
        self.since_s = self.since_s or time.time()
        self._looking.close()

    def _check(self, source: Any) -> None:
        path = source if isinstance(source, str | os.PathLike) else getattr(source, "name", None)
        try:
            changed_s = os.stat(path).st_mtime if path is not None else 0.0  # noqa: PTH116
        except (OSError, TypeError, ValueError):
            return  # torch.load tells it, or it is no file
        if changed_s > self.since_s:
            refuse(_goes_on_itself(str(path)))


def _goes_on_itself(path: str) -> FasttrainError:
    return FasttrainError(
        "the run can't go on from its snapshot",
        why=f"before its first step the script loads {path}, which was saved behind the first"
        " step of this run: it goes on from a checkpoint of its own, where it must begin anew",
        fix="use --preempt signal with such a script, or move its checkpoint away",
        slug="snapshot-checkpoint",
    )
