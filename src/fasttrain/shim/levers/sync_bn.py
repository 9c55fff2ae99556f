"""BatchNorm over the whole batch, where each rank has a part of it.

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
from torch import distributed as dist
from torch.autograd.function import FunctionCtx
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from fasttrain.shim.ledger import Ledger
from fasttrain.shim.parallel_context import ParallelContext
from fasttrain.spec.outcome import State


class SyncBatchNormLever:
    """Computes the statistics of BatchNorm in training mode over all ranks."""

    def __init__(self, ledger: Ledger, context: ParallelContext) -> None:
        self.ledger = ledger
        self._ranks = context.ranks
        self._batches = context.batches

    def install(self, undo: ExitStack) -> None:
        """Replace the forward of all BatchNorm modules."""
        owner: Any = _BatchNorm
        torchs: Any = torch.compiler
        original, synchronised = owner.forward, torchs.disable(self._forward)

        @functools.wraps(original)
        def forward(module: _BatchNorm, batch: Tensor) -> Any:
            applies = (
                self.ledger.live
                and module.training
                and torch.is_grad_enabled()
                and self._ranks.joined
            )
            whole = self._batches.current == "whole"  # a batch that every rank has
            if not applies or whole or isinstance(module, SyncBatchNorm):
                return original(module, batch)
            return synchronised(module, batch)

        undo.callback(setattr, owner, "forward", original)
        owner.forward = forward
        self.ledger.settle(State.ARMED, "no BatchNorm was trained")
        self.ledger.excuse(State.SKIPPED, "the model has no BatchNorm")

    def refresh(self) -> None:
        """Nothing is pending: every call is counted as it happens."""

    def _forward(self, module: Any, batch: Tensor) -> Tensor:
        module._check_input_dim(batch)
        self.ledger.apply(type(module).__name__, "")
        # (batch, channels, ...): each channel has its statistics over all other dimensions.
        others = [dim for dim in range(batch.dim()) if dim != 1]
        shape = [1, -1, *[1] * (batch.dim() - 2)]
        values = batch.float() if batch.dtype in (torch.float16, torch.bfloat16) else batch
        share = self._batches.share
        counts = float(share is None or share.count > 0)  # a stand-in sample counts nothing
        count = values.new_tensor([counts * values.numel() / values.size(1)])
        sums = _summed(torch.cat([counts * values.sum(others), count]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        variance = _summed(counts * centred.square().sum(others)) / count
        _update(module, mean.detach(), variance.detach(), count)
        result: Tensor = centred * torch.rsqrt(variance + module.eps).view(shape)
        if module.weight is not None:
            result = result * module.weight.view(shape)
        if module.bias is not None:
            result = result + module.bias.view(shape)
        return result.to(batch.dtype)


class _Sum(torch.autograd.Function):
    """Adds up over the ranks; what follows from the sum on any of them flows back to all."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor) -> Tensor:  # noqa: ARG004
        whole = part.detach().clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:  # noqa: ARG004
        whole = gradient.clone()
        dist.all_reduce(whole)
        return whole


def _summed(part: Tensor) -> Tensor:
    function: Any = _Sum
    whole: Tensor = function.apply(part)
    return whole


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
