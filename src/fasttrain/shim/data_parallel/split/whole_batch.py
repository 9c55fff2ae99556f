"""BatchNorm over the whole batch, where each rank has rows of it.

The modules stay what they are, where torch's ``SyncBatchNorm.convert_sync_batchnorm`` would put
others in their place, which other checkpoints and ``isinstance`` don't know; and it works on a CPU,
where torch's kernels don't.

Source: ``torch/nn/modules/batchnorm.py`` of torch 2.13, ``_BatchNorm.forward``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from fasttrain.shim.data_parallel.split.call import SplitCalls
from fasttrain.shim.data_parallel.split.reduction import total


def install(splits: SplitCalls, undo: ExitStack) -> None:
    """Replace the forward of all BatchNorm modules, for what is inside of a split call."""
    owner: Any = _BatchNorm
    original = owner.forward

    @functools.wraps(original)
    def forward(module: _BatchNorm, batch: Tensor) -> Any:
        if not (splits.active and module.training) or isinstance(module, SyncBatchNorm):
            return original(module, batch)
        return _forward(module, batch)

    undo.callback(setattr, owner, "forward", original)
    owner.forward = forward


def _forward(module: Any, batch: Tensor) -> Tensor:
    module._check_input_dim(batch)
    # (batch, channels, ...): each channel has its statistics over all other dimensions.
    shape = _per_channel(batch)
    values = batch.float() if batch.dtype in (torch.float16, torch.bfloat16) else batch
    own = values.numel() // values.size(1)
    mean, variance = (moment.to(_exact(moment)) for moment in _moments(values))
    count = mean.new_full((1,), own)
    sums = total(torch.cat([own * mean, own * (variance + mean.square()), count]))
    count = sums[-1].detach()
    mean, squares = (part / count for part in sums[:-1].chunk(2))
    variance = squares - mean.square()
    _update(module, mean.detach(), variance.detach(), count)
    scale = torch.rsqrt(variance + module.eps)
    if module.weight is not None:
        scale = scale * module.weight
    shift = -mean * scale
    if module.bias is not None:
        shift = shift + module.bias
    scale, shift = (part.to(values.dtype).view(shape) for part in (scale, shift))
    result: Tensor = torch.addcmul(shift, values, scale)
    return result.to(batch.dtype)


def _per_channel(batch: Tensor) -> list[int]:
    """Return the shape of a number for each channel, to be combined with a batch."""
    return [1, -1, *[1] * (batch.dim() - 2)]


def _moments(values: Tensor) -> Sequence[Tensor]:
    """Return the mean and the variance of each channel."""
    if torch.compiler.is_compiling():  # a compiler makes few passes of it by itself
        others = [dim for dim in range(values.dim()) if dim != 1]
        variance, mean = torch.var_mean(values, others, correction=0)
        return mean, variance
    apply: Any = _Moments.apply
    moments: tuple[Tensor, Tensor] = apply(values)
    return moments


class _Moments(torch.autograd.Function):
    """As torch.var_mean over these dimensions, which takes several times as long on a CPU."""

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


def _exact(like: Tensor) -> torch.dtype:
    """Return the precision for a mean of squares less a squared mean; some devices have no fp64."""
    return torch.float64 if like.device.type in ("cpu", "cuda") else torch.float32


def _update(module: _BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Bring the running statistics up to date, as one process would with the whole batch."""
    if not module.track_running_stats or module.running_mean is None:
        return
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    weight = 1.0 / float(module.num_batches_tracked) if momentum is None else momentum
    unbiased = variance * (count / (count - 1).clamp(min=1))
    for running, new in ((module.running_mean, mean), (module.running_var, unbiased)):
        # As torch's kernels do, which autograd doesn't notice: graphs of other calls may hold it.
        kept = running if torch.compiler.is_compiling() else running.data
        kept.lerp_(new.to(running.dtype), weight)
