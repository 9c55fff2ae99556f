"""Activation checkpoints: what is repeated is repeated as it ran.

A checkpoint repeats its function within the backward pass, when no call is running any more. Inside
of a split call that is a part of one; a model that is called inside of a checkpoint is called
whole, because the repeated call could be split in another way than the first one.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from torch.utils import checkpoint as torchs

from fasttrain.shim.data_parallel.split.call import SplitCalls


def install(splits: SplitCalls, undo: ExitStack) -> None:
    """Replace ``torch.utils.checkpoint.checkpoint``."""
    original = torchs.checkpoint

    @functools.wraps(original)
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_reentrant", True) is not False:
            splits.reentrant = True
        name = "active" if splits.active else "whole_only"
        function = functools.partial(_repeatable, splits, name, function)
        return original(function, *args, **kwargs)

    undo.callback(setattr, torchs, "checkpoint", original)
    torchs.checkpoint = checkpoint


def _repeatable(splits: SplitCalls, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    before = getattr(splits, name)
    setattr(splits, name, True)
    try:
        return function(*args, **kwargs)
    finally:
        setattr(splits, name, before)
