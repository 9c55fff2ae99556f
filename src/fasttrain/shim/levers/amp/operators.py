"""Operators that run in fp32 inside a root because torch's own rules break them in backward.

Autocast has no rule for them: they take low-precision tensors, or mixed ones, forward, and their
backward has no kernel for those. A failure there can't be repeated.

Source: every differentiable operator of torch 2.13's own list of samples (``op_db``) was run on a
CPU under autocast with low-precision inputs, first, rest and all, and differentiated; those for
sparse matrices, which it lacks, by hand.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
from torch.amp import autocast
from torch.nn import functional

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.casting import to_float32
from fasttrain.shim.hooks.dynamo_skip import pass_over
from fasttrain.shim.levers.amp.functions import Region

# Where scripts find them, and what torch.jit.script calls them.
OPERATORS: tuple[tuple[Any, str, str], ...] = (
    (torch.sparse, "mm", "_sparse_mm"),
    (torch.sparse, "addmm", "_sparse_addmm"),
    (torch, "pdist", "pdist"),
    (functional, "pdist", "pdist"),
    (torch, "addr", "addr"),
    (torch.special, "i1", "special_i1"),
    (torch.special, "i1e", "special_i1e"),
)


def run_in_float32(dtype: torch.dtype, region: Region, undo: ExitStack) -> None:
    """Replace the operators for calls inside a root that runs in ``dtype``."""
    for owner, name, aten in OPERATORS:
        original = getattr(owner, name, None)  # not every torch has them all
        if original is not None:
            replacement = _in_float32(original, dtype, region)
            # A script may pickle it, as a part that its model was built with.
            replacement.__module__, replacement.__qualname__ = owner.__name__, name
            replace_builtin(owner, replacement, name, undo, aten)


def _in_float32(original: Any, dtype: torch.dtype, region: Region) -> Any:
    @functools.wraps(original)
    def operator(*args: Any, **kwargs: Any) -> Any:
        if not region.device:
            return original(*args, **kwargs)
        with autocast(region.device, enabled=False):
            return original(*to_float32(args, dtype), **to_float32(kwargs, dtype))

    pass_over(operator, all_it_calls=True)
    return operator


def replace_builtin(
    owner: Any, replacement: Any, name: str, undo: ExitStack, aten: str = ""
) -> None:
    """Put a function in the place of an operator; torch.jit.script is told which one it is."""
    patching.put(owner, name, replacement, undo)
    builtins: Any = torch.jit._builtins
    table = builtins._get_builtin_table()
    table[id(replacement)] = f"aten::{aten or name}"
    undo.callback(table.pop, id(replacement))
