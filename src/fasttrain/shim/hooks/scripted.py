"""Replaces an operator by a function that torch.jit.script takes for the operator."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from fasttrain.shim.hooks import patching


def replace_builtin(
    owner: Any, replacement: Any, name: str, undo: ExitStack, aten: str = ""
) -> None:
    """Replace an operator by a function that torch.jit.script takes for the operator."""
    patching.put(owner, name, replacement, undo)
    builtins: Any = torch.jit._builtins
    table = builtins._get_builtin_table()
    table[id(replacement)] = f"aten::{aten or name}"
    undo.callback(table.pop, id(replacement))
