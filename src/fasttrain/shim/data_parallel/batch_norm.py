"""BatchNorm over the whole batch, where each rank has rows of it.

The modules stay what they are, where torch's ``SyncBatchNorm.convert_sync_batchnorm`` would put
others in their place, which other checkpoints and ``isinstance`` don't know; and it works on a CPU,
where torch's kernels don't.

Source: ``torch/nn/modules/batchnorm.py`` of torch 2.13, ``_BatchNorm.forward``.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from fasttrain.shim.data_parallel.reduction import total
from fasttrain.shim.data_parallel.split import SplitCalls


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
    others = [dim for dim in range(batch.dim()) if dim != 1]
    shape = [1, -1, *[1] * (batch.dim() - 2)]
    values = batch.float() if batch.dtype in (torch.float16, torch.bfloat16) else batch
    count = values.new_full((1,), values.numel() / values.size(1))
    sums = total(torch.cat([values.sum(others), count]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = values - mean.view(shape)
    variance = total(centred.square().sum(others)) / count
    _update(module, mean.detach(), variance.detach(), count)
    result: Tensor = centred * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        result = result * module.weight.view(shape)
    if module.bias is not None:
        result = result + module.bias.view(shape)
    return result.to(batch.dtype)


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
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), weight)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), weight)
