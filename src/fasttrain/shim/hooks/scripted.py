"""Replaces functions of torch so that torch.jit.script compiles what it did before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
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


def scriptable(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Any:
    """Return a wrapper that torch.jit.script compiles as the function that it wraps.

    TorchScript reads the source of what is wrapped, but looks its names up where the wrapper is
    written. The one that is returned is written where the original is, as it were.

    Args:
        wrapper: A function that uses no global names, only arguments and closed-over ones.
        original: What it wraps.
    """
    made: Any = wrapper
    known: Any = original
    written = FunctionType(made.__code__, known.__globals__, closure=made.__closure__)
    return functools.update_wrapper(written, original)
