"""Gives BatchNorm the statistics of the whole batch inside a split call.

Its modules keep their class, where torch's ``SyncBatchNorm.convert_sync_batchnorm`` would replace
them, which checkpoints and ``isinstance`` would notice. On CUDA it runs SyncBatchNorm's kernels, on
a CPU those of torch's own BatchNorm, elsewhere and in compiled code plain operators; each direction
sums once over the ranks.

Source: ``torch/nn/modules/batchnorm.py``, ``_functions.py`` and ``aten/src/ATen/native/
Normalization.cpp`` of torch 2.13.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad as gradients_of  # before a lever replaces it
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from fasttrain.shim.data_parallel.split.call import SplitCalls
from fasttrain.shim.data_parallel.split.rows import Collectives, total
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.scripted import scriptable

_LOW = (torch.float16, torch.bfloat16)


def install(splits: SplitCalls, ranks: Collectives, undo: ExitStack) -> None:
    """Replace the forward of all BatchNorm modules, for use inside split calls."""
    original = _BatchNorm.forward
    synchronised, of_whole_batch = SyncBatchNorm, _forward

    def forward(module: Any, batch: Any) -> Any:
        if not (splits.active and module.training) or isinstance(module, synchronised):
            return original(module, batch)
        module._check_input_dim(batch)
        return of_whole_batch(module, batch, ranks)

    patching.put(_BatchNorm, "forward", scriptable(forward, original), undo)


def _forward(module: Any, batch: Tensor, ranks: Collectives) -> Any:
    kernels = None if torch.compiler.is_compiling() else _kernels_for(batch)
    weight, bias, low = module.weight, module.bias, batch.dtype in _LOW
    if kernels is None:
        values = batch.float() if low else batch
        result, *moments = _normalised(values, weight, bias, module.eps, ranks)
        _update(module, *moments)
        return result.to(batch.dtype)
    if kernels is _Cpu:  # they take parameters of the batch's precision, or with a low one fp32
        exact = torch.float32 if low else batch.dtype
        weight, bias = (part if part is None else part.to(exact) for part in (weight, bias))
    return _ByKernels.apply(batch, weight, bias, kernels, module, ranks)  # type: ignore[no-untyped-call]


class _Cuda:
    """SyncBatchNorm's kernels; the second moment is 1 / sqrt(variance + eps)."""

    @staticmethod
    def statistics(values: Tensor, module: Any, ranks: Collectives) -> tuple[Tensor, ...]:
        """Return both moments of the whole batch, and the number of values of each rank."""
        mean, invstd = torch.batch_norm_stats(values, module.eps)
        means, invstds, counts = _of_all_ranks(mean, invstd, values, ranks)
        running, momentum = _running(module)
        by = counts.reshape(-1) if running[0] is None else counts.reshape(-1).to(running[0].dtype)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            values, means, invstds, *running, momentum, module.eps, by
        )
        return mean, invstd, counts.to(torch.int32)

    @staticmethod
    def scaled(values: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor) -> Tensor:
        """Return the result of these rows."""
        return torch.batch_norm_elemt(values, weight, bias, mean, invstd, 0.0)  # eps isn't read

    @staticmethod
    def sums(
        gradient: Tensor, values: Tensor, weight: Any, mean: Tensor, invstd: Tensor
    ) -> tuple[Tensor, Any, Any]:
        """Return two sums of these rows for each channel, and gradients of weight and bias."""
        kernel: Any = torch.batch_norm_backward_reduce
        wanted = True, weight is not None, weight is not None
        *sums, of_weight, of_bias = kernel(gradient, values, mean, invstd, weight, *wanted)
        return torch.cat(sums), of_weight, of_bias

    @staticmethod
    def of_batch(
        gradient: Tensor, values: Tensor, weight: Any, moments: tuple[Tensor, Tensor],
        sums: Tensor, counts: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the gradient of these rows from the sums over all rows."""
        mean, invstd = moments
        scale = weight if weight is None else weight.to(mean.dtype)
        kernel: Any = torch.batch_norm_backward_elemt
        result: Tensor = kernel(gradient, values, mean, invstd, scale, *sums.chunk(2), counts)
        return result


class _Cpu:
    """The kernels that torch's own BatchNorm has on a CPU; the second moment is variance + eps."""

    @staticmethod
    def statistics(values: Tensor, module: Any, ranks: Collectives) -> tuple[Tensor, ...]:
        exact = values.float() if values.dtype in _LOW else values  # they get its precision
        mean, variance = torch.batch_norm_update_stats(exact, None, None, 0.0)
        mean, variance, count = _combined(*_of_all_ranks(mean, variance, values, ranks))
        _update(module, mean, variance, count)
        return mean, variance + module.eps, count

    @staticmethod
    def scaled(values: Tensor, weight: Any, bias: Any, mean: Tensor, square: Tensor) -> Tensor:
        evaluation = False, 0.0, 0.0  # there the moments are given
        kernel: Any = torch.native_batch_norm
        result: Tensor = kernel(values, weight, bias, mean, square, *evaluation)[0]
        return result

    @staticmethod
    def sums(
        gradient: Tensor, values: Tensor, weight: Any, mean: Tensor, square: Tensor
    ) -> tuple[Tensor, Any, Any]:
        # In evaluation the gradients of weight and bias are the sums that training needs.
        kernel: Any = torch.ops.aten.native_batch_norm_backward
        given = gradient, values, weight, mean, square, None, None, False, 0.0
        _, of_weight, of_bias = kernel(*given, [False, True, True])
        return torch.cat([of_bias, of_weight]), of_weight, of_bias

    @staticmethod
    def of_batch(
        gradient: Tensor, values: Tensor, weight: Any, moments: tuple[Tensor, Tensor],
        sums: Tensor, count: Tensor,
    ) -> Tensor:  # fmt: skip
        mean, square = moments
        invstd, shape = square.rsqrt(), _per_channel(values)
        scale = invstd if weight is None else invstd * weight
        of_bias, of_weight = (sums / count).chunk(2)
        slope = -scale * invstd * of_weight
        shift = -scale * of_bias - slope * mean
        result = torch.addcmul(shift.view(shape), values, slope.view(shape))
        return result.addcmul_(gradient, scale.view(shape)).to(values.dtype)


def _kernels_for(batch: Tensor) -> Any:
    """Return torch's kernels for the device of a tensor, or None."""
    return _Cuda if batch.is_cuda else _Cpu if batch.is_cpu else None


class _ByKernels(torch.autograd.Function):
    """By kernels: on CUDA 14 operators in both directions instead of 67.

    torch's own function can't be used: it waits for the device in each call, to leave out ranks
    without rows, which a split call doesn't have; and it can't be differentiated twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        batch: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kernels: Any,
        module: Any,
        ranks: Collectives,
    ) -> Tensor:
        values = _dense(batch)
        *moments, counts = kernels.statistics(values, module, ranks)
        ctx.how = kernels, module.eps, ranks
        ctx.save_for_backward(values, weight, bias, *moments, counts)
        result: Tensor = kernels.scaled(values, weight, bias, *moments)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, weight, bias, *moments, counts = ctx.saved_tensors
        kernels, eps, ranks = ctx.how
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # it will be differentiated again
            parts = _twice_differentiable((values, weight, bias), eps, ranks, gradient, wanted)
            return *parts, None, None, None
        gradient = _dense(gradient)
        given = gradient, values, weight
        sums, of_weight, of_bias = kernels.sums(*given, *moments)
        of_batch = kernels.of_batch(*given, moments, total(sums), counts) if wanted[0] else None
        if weight is None:
            of_weight = of_bias = None
        return of_batch, of_weight, of_bias, None, None, None


def _dense(values: Tensor) -> Tensor:
    """Return a tensor in a memory order that the kernels support."""
    orders: Any = (torch.channels_last, torch.channels_last_3d)
    kept = any(values.dim() == 4 + at and values.is_contiguous(memory_format=order)
               for at, order in enumerate(orders))  # fmt: skip
    return values if kept else values.contiguous()


def _twice_differentiable(
    inputs: tuple[Tensor, Any, Any], eps: float, ranks: Collectives, gradient: Tensor, wanted: Any
) -> list[Tensor | None]:
    values, weight, bias = inputs
    low = values.dtype in _LOW
    result, *_ = _normalised(values.float() if low else values, weight, bias, eps, ranks)
    of = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
    found = iter(gradients_of(result.to(values.dtype), of, gradient, create_graph=True))
    return [next(found) if want else None for want in wanted]


def _normalised(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: Collectives
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, and the mean, the variance and the number of values of each channel."""
    # (batch, channels, ...): each channel has statistics over all other dimensions.
    shape = _per_channel(values)
    mean, variance, count = _combined(*_of_all_ranks(*_moments(values), values, ranks))
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    factor, summand = (part.to(values.dtype).view(shape) for part in (scale, shift))
    return torch.addcmul(summand, values, factor), mean.detach(), variance.detach(), count


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of each channel."""
    others = [dim for dim in range(values.dim()) if dim != 1]
    variance, mean = torch.var_mean(values, others, correction=0)
    return mean, variance


def _of_all_ranks(
    mean: Tensor, moment: Tensor, values: Tensor, ranks: Collectives
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the means, other moments and counts of all ranks, (ranks, channels) or (ranks, 1)."""
    count = mean.new_full((1,), values.numel() // values.size(1))
    own = torch.cat([mean, moment, count])
    nothing = torch.zeros_like(own)
    each = [own if rank == ranks.rank else nothing for rank in range(ranks.world_size)]
    means, moments, counts = torch.split(
        total(torch.stack(each)), [mean.numel(), mean.numel(), 1], dim=1
    )
    return means, moments, counts.detach()


def _combined(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and the variance over all ranks, and the number of all values."""
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    # Not E[x²] - E[x]², which cancels.
    variance = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, variance, count


def _per_channel(batch: Tensor) -> list[int]:
    """Return the shape in which one number per channel broadcasts with a batch."""
    return [1, -1, *[1] * (batch.dim() - 2)]


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
