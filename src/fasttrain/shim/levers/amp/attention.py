"""Differentiates short attention on a CPU in fp32.

Torch's backward of attention in bf16 takes some 0.15 ms for each head of each sample, however few
positions there are: 7.3 ms for 48 heads of 64 positions, where all in fp32 takes 1 ms and the
forward 0.3. From about 256 positions on bf16 is faster (torch 2.13, a CPU with amx_bf16).
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.scripted import replace_builtin
from fasttrain.shim.levers.amp.operators import lifted
from fasttrain.shim.levers.amp.script_hooks import Region

SHORT = 256  # positions of queries and keys; with fewer it runs in fp32
_NAME = "scaled_dot_product_attention"


def attend_in_float32(dtype: torch.dtype, region: Region, undo: ExitStack) -> None:
    """Replace attention for calls inside a root on a CPU that runs in ``dtype``."""
    original: Any = functional.scaled_dot_product_attention

    @functools.wraps(original)
    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        given = query, key, value
        if has_torch_function(given):
            return handle_torch_function(attention, given, *given, *args, **kwargs)
        if not (_is_low(dtype, region) and _is_short(given)):
            return original(*given, *args, **kwargs)
        with autocast("cpu", enabled=False):
            others = [lifted(value, dtype) for value in args]
            named = {name: lifted(value, dtype) for name, value in kwargs.items()}
            output = original(query.float(), key.float(), value.float(), *others, **named)
        return output.to(dtype)  # as autocast would have it

    pass_over(attention)
    attention.__module__, attention.__qualname__ = "torch.nn.functional", _NAME
    replace_builtin(functional, attention, _NAME, undo)


def _is_low(dtype: torch.dtype, region: Region) -> bool:
    """True in a root's call under autocast, which a trial of several ranks switches off."""
    if not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is not dtype:
        return False
    # While a graph is traced a thread's own region can't be asked.
    return torch.compiler.is_compiling() or region.where() == "cpu"


def _is_short(given: tuple[Tensor, ...]) -> bool:
    """True if a differentiated call has few positions."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in given):
        return False
    plain = all(
        tensor.is_cpu and not tensor.is_nested and tensor.dtype is not torch.float64
        for tensor in given
    )
    return plain and max(given[0].size(-2), given[1].size(-2)) < SHORT
