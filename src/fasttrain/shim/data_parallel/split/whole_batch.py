"""Makes losses and activation checkpoints right inside a split call.

Losses that a model computes itself are reduced over the rows of all ranks. An activation checkpoint
is recomputed as part of the split or the whole call in which it ran first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import checkpoint as torchs

from fasttrain.shim.data_parallel.split.call import SplitCalls
from fasttrain.shim.data_parallel.split.rows import total
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.scripted import scriptable

_broadcast: Any = torch.broadcast_shapes  # without annotations
Given = Mapping[str, Any]  # the arguments of a loss by their names
Count = Callable[[Given], Any]  # returns a mean's divisor: a number, or a tensor with one


def install_losses(splits: SplitCalls, undo: ExitStack) -> None:
    """Replace torch's functions for losses, for use inside split calls.

    There a mean or a sum over the rank's rows would be the rank's own. These functions reduce over
    all elements, so that the value over the whole batch is the sum of all ranks' sums, divided for
    a mean by the sum of their divisors.

    Source: ``torch/nn/functional.py`` and ``aten/src/ATen/native/LossNLL.cpp`` of torch 2.13.
    """
    for name, count in _MEANS.items():
        make = functools.partial(_over_all_ranks, count, splits)
        patching.wrap(functional, name, make, undo)


def _over_all_ranks(count: Count, splits: SplitCalls, original: Callable[..., Tensor]) -> Any:
    reduced = functools.partial(_reduced, count, splits, original)

    def loss(*args: Any, **kwargs: Any) -> Any:
        return reduced(args, kwargs)

    return scriptable(loss, original)


def _reduced(
    count: Count, splits: SplitCalls, original: Callable[..., Tensor], args: Any, kwargs: Any
) -> Any:
    reduction = kwargs.get("reduction", "mean")
    # A reduction given by position, or in the way of torch 0.4, isn't handled: a trial finds the
    # difference, and the call isn't split.
    named = len(args) <= 2 and not kwargs.keys() & {"size_average", "reduce"}
    if not (splits.active and named and reduction in ("mean", "sum", "batchmean")):
        return original(*args, **kwargs)
    own = original(*args, **{**kwargs, "reduction": "sum"})
    if reduction == "sum":
        return total(own, of_loss=True)
    by = own.new_zeros(()) + count({**dict(zip(("input", "target"), args, strict=False)), **kwargs})
    whole, by = total(torch.stack([own, by]), of_loss=True).unbind()
    return whole / by


def _elements(given: Given) -> int:
    return math.prod(_broadcast(given["input"].shape, given["target"].shape))


def _weights(given: Given) -> Any:
    """Return the sum of the weights: a mean of weighted errors is divided by it."""
    weight = given.get("weight")
    return _elements(given) if weight is None else weight.sum()


def _of_kl(given: Given) -> int:
    by_batch = given.get("reduction") == "batchmean"
    return int(given["input"].size(0)) if by_batch else _elements(given)


def _of_classes(given: Given) -> Any:
    """Return the number of targets that aren't ignored, each weighted by its class."""
    scores, target, weight = given["input"], given["target"], given.get("weight")
    if target.is_floating_point():  # class probabilities
        return scores.numel() / scores.size(1 if scores.dim() > 1 else 0)
    target = target.long()  # uint8, which is allowed, would select as a mask
    counts = target != given.get("ignore_index", -100)
    if weight is None:
        return counts.sum()
    return weight[target.where(counts, 0)].where(counts, 0.0).sum()


_MEANS: dict[str, Count] = {
    "binary_cross_entropy": _elements,
    "binary_cross_entropy_with_logits": _elements,
    "cross_entropy": _of_classes,
    "huber_loss": _elements,  # whatever its weights
    "kl_div": _of_kl,
    "l1_loss": _weights,
    "mse_loss": _weights,
    "nll_loss": _of_classes,
    "smooth_l1_loss": _elements,
}


def install_checkpoints(splits: SplitCalls, undo: ExitStack) -> None:
    """Replace ``torch.utils.checkpoint.checkpoint``, which recomputes in the backward pass.

    By then the call is over. A checkpoint inside a split call is recomputed as a part of a split
    call. A model that is called inside a checkpoint is never split, because the recomputation could
    be split in another way than the first call.
    """
    original = torchs.checkpoint

    @functools.wraps(original)
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_reentrant", True) is not False:
            splits.reentrant = True
        name = "active" if splits.active else "whole_only"
        function = functools.partial(_repeatable, splits, name, function)
        return original(function, *args, **kwargs)

    patching.put(torchs, "checkpoint", checkpoint, undo)


def _repeatable(splits: SplitCalls, name: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    before = getattr(splits, name)
    setattr(splits, name, True)
    try:
        return function(*args, **kwargs)
    finally:
        setattr(splits, name, before)
