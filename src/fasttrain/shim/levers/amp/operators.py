"""Operators that run in fp32 inside a root because they fail under autocast in backward.

Autocast has no rule for them: their forward takes low-precision or mixed tensors, for which their
backward has no kernel. A call that failed in its backward pass can't be repeated in fp32.

Source: every differentiable operator of torch 2.13's own list of samples (``op_db``) was run on a
CPU under autocast and differentiated, with its first input, the others and all of them in low
precision; those for sparse matrices, which the list lacks, by hand.
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

# Module, name, and the name that torch.jit.script has for the operator.
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
        original = getattr(owner, name, None)  # some torch versions lack some of them
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
    """Replace an operator by a function that torch.jit.script takes for the operator."""
    patching.put(owner, name, replacement, undo)
    builtins: Any = torch.jit._builtins
    table = builtins._get_builtin_table()
    table[id(replacement)] = f"aten::{aten or name}"
    undo.callback(table.pop, id(replacement))
