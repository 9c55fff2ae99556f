"""Makes BatchNorm, losses and activation checkpoints right inside a split call.

BatchNorm computes its statistics over the whole batch. Its modules keep their class, where torch's
``SyncBatchNorm.convert_sync_batchnorm`` would replace them, which checkpoints and ``isinstance``
would notice. On CUDA it runs SyncBatchNorm's kernels, elsewhere and in compiled code plain
operators; either way each direction sums once over the ranks. Losses that a model
computes itself are reduced over the rows of all ranks. An activation checkpoint is recomputed as
part of the split or the whole call in which it ran first.

Source: ``torch/nn/modules/batchnorm.py`` and ``_functions.py`` of torch 2.13.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad as gradients_of  # before a lever replaces it
from torch.autograd.function import FunctionCtx
from torch.nn import SyncBatchNorm, functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint as torchs

from fasttrain.shim.data_parallel.split.call import SplitCalls
from fasttrain.shim.data_parallel.split.rows import Collectives, total
from fasttrain.shim.hooks import patching


def install(splits: SplitCalls, ranks: Collectives, undo: ExitStack) -> None:
    """Replace the forward of all BatchNorm modules, for use inside split calls."""
    original = _BatchNorm.forward

    @functools.wraps(original)
    def forward(module: Any, batch: Tensor) -> Any:
        if not (splits.active and module.training) or isinstance(module, SyncBatchNorm):
            return original(module, batch)
        module._check_input_dim(batch)
        if _has_kernels(batch) and not torch.compiler.is_compiling():
            return _ByKernels.apply(batch, module.weight, module.bias, module, ranks)  # type: ignore[no-untyped-call]
        values = batch.float() if batch.dtype in _LOW else batch
        result, *moments = _normalised(values, module.weight, module.bias, module.eps, ranks)
        _update(module, *moments)
        return result.to(batch.dtype)

    patching.put(_BatchNorm, "forward", forward, undo)


_LOW = (torch.float16, torch.bfloat16)


def _has_kernels(batch: Tensor) -> bool:
    """True if torch has SyncBatchNorm's kernels for a tensor."""
    return batch.is_cuda


def _of_all_ranks(
    mean: Tensor, moment: Tensor, count: Tensor, ranks: Collectives
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the means, other moments and counts of all ranks, (ranks, channels) or (ranks, 1)."""
    own = torch.cat([mean, moment, count])
    nothing = torch.zeros_like(own)
    each = [own if rank == ranks.rank else nothing for rank in range(ranks.world_size)]
    means, moments, counts = torch.split(
        total(torch.stack(each)), [mean.numel(), mean.numel(), 1], dim=1
    )
    return means, moments, counts.detach()


def _normalised(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: Collectives
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, and the mean, the variance and the number of values of each channel."""
    # (batch, channels, ...): each channel has statistics over all other dimensions.
    shape = _per_channel(values)
    own_mean, own_variance = _moments(values)
    count = own_mean.new_full((1,), values.numel() // values.size(1))
    means, variances, counts = _of_all_ranks(own_mean, own_variance, count, ranks)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    # Not E[x²] - E[x]², which cancels.
    variance = ((variances + (means - mean).square()) * counts).sum(0) / count
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    factor, summand = (part.to(values.dtype).view(shape) for part in (scale, shift))
    return torch.addcmul(summand, values, factor), mean.detach(), variance.detach(), count


class _ByKernels(torch.autograd.Function):
    """The same by SyncBatchNorm's kernels: 14 operators in both directions instead of 67.

    torch's own function can't be used: it waits for the device in each call, to leave out ranks
    without rows, which a split call doesn't have; and it can't be differentiated twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        batch: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        module: Any,
        ranks: Collectives,
    ) -> Tensor:
        values = _dense(batch)
        mean, invstd = torch.batch_norm_stats(values, module.eps)
        count = mean.new_full((1,), values.numel() // values.size(1))
        means, invstds, counts = _of_all_ranks(mean, invstd, count, ranks)
        running, momentum = _running(module)
        by = counts.reshape(-1) if running[0] is None else counts.reshape(-1).to(running[0].dtype)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            values, means, invstds, *running, momentum, module.eps, by
        )
        ctx.how = module.eps, ranks
        ctx.save_for_backward(values, weight, bias, mean, invstd, counts.to(torch.int32))
        return torch.batch_norm_elemt(values, weight, bias, mean, invstd, module.eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, weight, bias, mean, invstd, counts = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # it will be differentiated again
            return (
                *_twice_differentiable(values, weight, bias, ctx.how, gradient, wanted),
                None,
                None,
            )
        gradient = _dense(gradient)
        sums, of_weight, of_bias = _reduced(gradient, values, mean, invstd, weight, wanted)
        of_batch = None
        if wanted[0]:
            both = total(torch.cat(sums)).chunk(2)
            scale = weight if weight is None else weight.to(mean.dtype)
            kernel: Any = torch.batch_norm_backward_elemt
            of_batch = kernel(gradient, values, mean, invstd, scale, *both, counts)
        return of_batch, of_weight, of_bias, None, None


def _dense(values: Tensor) -> Tensor:
    """Return a tensor in a memory order that the kernels support."""
    orders: Any = (torch.channels_last, torch.channels_last_3d)
    kept = any(values.dim() == 4 + at and values.is_contiguous(memory_format=order)
               for at, order in enumerate(orders))  # fmt: skip
    return values if kept else values.contiguous()


def _reduced(
    gradient: Tensor, values: Tensor, mean: Tensor, invstd: Tensor, weight: Any, wanted: Any
) -> tuple[tuple[Tensor, Tensor], Tensor | None, Tensor | None]:
    """Return two sums of this rank's rows for the batch's gradient; those of weight and bias."""
    kernel: Any = torch.batch_norm_backward_reduce
    of_gradient, of_product, of_weight, of_bias = kernel(
        gradient, values, mean, invstd, weight, *wanted
    )
    sums = of_gradient, of_product
    return (sums, of_weight, of_bias) if weight is not None else (sums, None, None)


def _twice_differentiable(
    values: Tensor, weight: Any, bias: Any, how: Any, gradient: Tensor, wanted: Any
) -> list[Tensor | None]:
    inputs = (values, weight, bias)
    low = values.dtype in _LOW
    result, *_ = _normalised(values.float() if low else values, weight, bias, *how)
    of = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
    found = iter(gradients_of(result.to(values.dtype), of, gradient, create_graph=True))
    return [next(found) if want else None for want in wanted]


def _per_channel(batch: Tensor) -> list[int]:
    """Return the shape in which one number per channel broadcasts with a batch."""
    return [1, -1, *[1] * (batch.dim() - 2)]


def _moments(values: Tensor) -> Sequence[Tensor]:
    """Return the mean and the variance of each channel."""
    if torch.compiler.is_compiling():  # a compiler fuses it by itself
        others = [dim for dim in range(values.dim()) if dim != 1]
        variance, mean = torch.var_mean(values, others, correction=0)
        return mean, variance
    apply: Any = _Moments.apply
    moments: tuple[Tensor, Tensor] = apply(values)
    return moments


class _Moments(torch.autograd.Function):
    """Same as torch.var_mean over these dimensions, but several times as fast on a CPU."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor) -> tuple[Tensor, Tensor]:
        others = [dim for dim in range(values.dim()) if dim != 1]
        if values.is_cpu:
            mean = values.mean(others)
            variance = (values - mean.view(_per_channel(values))).square_().mean(others)
        else:
            variance, mean = torch.var_mean(values, others, correction=0)
        ctx.save_for_backward(values, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_variance: Tensor) -> Tensor:
        values, mean = ctx.saved_tensors
        own, shape = values.numel() // values.size(1), _per_channel(values)
        slope = of_variance * (2 / own)
        shift = of_mean / own - slope * mean
        return torch.addcmul(shift.view(shape), values, slope.view(shape))


def _update(module: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Update the running statistics, as one process would with the whole batch."""
    running, momentum = _running(module)
    unbiased = variance * (count / (count - 1).clamp(min=1))
    for kept, new in zip(running, (mean, unbiased), strict=True):
        if kept is not None:
            kept.lerp_(new.to(kept.dtype), momentum)


def _running(module: Any) -> tuple[tuple[Tensor | None, Tensor | None], float]:
    """Count a batch; return the running mean and variance, and the weight of the new ones."""
    if not module.track_running_stats or module.running_mean is None:
        return (None, None), 0.0
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    weight = 1.0 / float(module.num_batches_tracked) if momentum is None else momentum
    running = module.running_mean, module.running_var
    if not torch.compiler.is_compiling():
        # Like torch's kernels, without a new version: autograd graphs of other calls may hold it.
        running = tuple(kept.data for kept in running)
    return running, weight


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


def _over_all_ranks(
    count: Count, splits: SplitCalls, original: Callable[..., Tensor]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        reduction = kwargs.get("reduction", "mean")
        # A reduction given by position, or in the way of torch 0.4, isn't handled: a trial finds
        # the difference, and the call isn't split.
        named = len(args) <= 2 and not kwargs.keys() & {"size_average", "reduce"}
        if not (splits.active and named and reduction in ("mean", "sum", "batchmean")):
            return original(*args, **kwargs)
        own = original(*args, **{**kwargs, "reduction": "sum"})
        if reduction == "sum":
            return total(own, of_loss=True)
        by = own.new_zeros(()) + count(
            {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
        )
        whole, by = total(torch.stack([own, by]), of_loss=True).unbind()
        return whole / by

    return loss


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
