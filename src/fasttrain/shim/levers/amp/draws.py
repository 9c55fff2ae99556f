"""Has a root on a CPU draw the random numbers that it draws without bf16, rounded to it.

Of 16 normal numbers and more torch's CPU draws others in bf16 than in fp32: it has a kernel for
fp32 alone, and where their number is no multiple of 16, the generator is elsewhere afterwards, too.
A variational autoencoder would then get other noise, and from the last batch of its first epoch on,
which is rarely a full one, its rows in another order. Other distributions round what they draw;
before torch 2.13 uniform numbers are others, too.

Source: ``aten/src/ATen/native/cpu/DistributionTemplates.h`` of torch 2.13, ``normal_kernel``; all
operators that take a generator were compared in fp32 and bf16, with 8, 20 and 4,000 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast

from fasttrain.shim.levers.amp.operators import CPU_RULES, lifted
from fasttrain.shim.levers.amp.script_hooks import Region

FILLED = ("normal_", "uniform_")
DRAWN = ("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")
# It fills its tensor by the first one, but not where it is traced for one. Nor does randn, which
# no rule can see: it has no tensor by which torch would know of an autocast.
MADE = ("randn_like", "randn_like.generator")


def draw_in_float32(dtype: torch.dtype, region: Region, undo: ExitStack) -> None:
    """Register rules under the autocast of a CPU, as torch registers its own.

    Args:
        dtype: The low precision of roots.
        region: What runs in it.
        undo: Takes the inverse.
    """
    torchs: Any = torch.library  # without annotations
    rules = torchs.Library("aten", "IMPL", CPU_RULES)
    undo.callback(rules._destroy)

    def lowered() -> bool:
        return torch.compiler.is_compiling() or region.where() == "cpu"

    for name in (*FILLED, *DRAWN, *MADE):
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", CPU_RULES):
            continue  # torch's own
        packet, _, overload = name.partition(".")
        try:
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        except AttributeError:  # some torch versions lack some of them
            continue
        make = _filling if name in FILLED else _drawing if name in DRAWN else _making
        rules.impl(name, _without_autocast(operator, make(operator, dtype), lowered))


def _without_autocast(operator: Any, draw: Any, lowered: Callable[[], bool]) -> Any:
    def rule(*args: Any, **kwargs: Any) -> Any:
        made = draw if lowered() else operator  # asked under the autocast that is around it
        with autocast("cpu", enabled=False):
            return made(*args, **kwargs)

    return rule


def _filling(operator: Any, dtype: torch.dtype) -> Any:
    def fill(filled: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (filled.dtype is dtype and filled.is_cpu):
            return operator(filled, *args, **kwargs)
        # Where numbers lie decides which of them gets which.
        drawn = torch.empty_strided(filled.shape, filled.stride(), dtype=torch.float32)
        return filled.copy_(operator(drawn, *args, **kwargs))

    return fill


def _drawing(operator: Any, dtype: torch.dtype) -> Any:
    def draw(mean: Any, std: Any = 1.0, **kwargs: Any) -> Tensor:
        like: Tensor = mean if isinstance(mean, Tensor) else std
        given = (lifted(mean, dtype), lifted(std, dtype)) if like.is_cpu else (mean, std)
        drawn: Tensor = operator(*given, **kwargs)
        return drawn.to(like.dtype)

    return draw


def _making(operator: Any, dtype: torch.dtype) -> Any:
    def make(like: Tensor, **kwargs: Any) -> Any:
        device = torch.device(kwargs.get("device") or like.device)
        if (kwargs.get("dtype") or like.dtype) is not dtype or device.type != "cpu":
            return operator(like, **kwargs)
        return operator(like, **{**kwargs, "dtype": torch.float32}).to(dtype)

    return make
