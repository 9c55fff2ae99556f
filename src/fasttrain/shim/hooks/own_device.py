"""Keeps a rank's own device visible to it, whatever the script writes into the environment.

A script for one process may choose its GPU by ``os.environ["CUDA_VISIBLE_DEVICES"] = "0"``. CUDA
reads the variable at its first use, so all ranks would compute on one GPU, which NCCL refuses. The
variable therefore keeps the rank's device in this process, and in those that it starts.
"""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack
from typing import Any

from fasttrain.shim.hooks import patching
from fasttrain.shim.process.callsite import call_site

overruled: dict[str, None] = {}  # what the script has tried, in words for the receipt


def keep(variable: str, device: str, undo: ExitStack) -> None:
    """Set a variable, and set it to the same value again whenever the script sets it."""
    os.environ[variable] = device
    undo.callback(overruled.clear)
    environ: Any = type(os.environ)
    keeping = functools.partial(_keeping, variable, device)
    patching.wrap(environ, "__setitem__", keeping, undo)


def _keeping(variable: str, device: str, original: Any) -> Any:
    @functools.wraps(original)
    def __setitem__(environ: Any, key: Any, value: Any) -> None:  # noqa: N807 - its name
        if key == variable:
            overruled[
                f"the script sets {variable} to {value} ({call_site()}), as for one process:"
                " each rank keeps its own device"
            ] = None
            value = device
        original(environ, key, value)

    return __setitem__
