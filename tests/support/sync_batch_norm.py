"""SyncBatchNorm's kernels, which torch has for CUDA alone, by plain operators.

Source: aten/src/ATen/native/cuda/Normalization.cuh of torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def others(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def wide(moment: Tensor, like: Tensor) -> Tensor:
    return moment.reshape(1, -1, *[1] * (like.dim() - 2))


def batch_norm_stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(values.float(), others(values), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    values: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert running_mean is None or counts.dtype == running_mean.dtype
    by, n = counts[:, None].double(), counts.double().sum()
    mean = (means * by).sum(0) / n
    squares = ((invstds.double() ** -2 - eps + means.double() ** 2) * by).sum(0) / n
    variance = squares - mean**2
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(momentum * mean)
        running_var.mul_(1 - momentum).add_(momentum * variance * n / (n - 1))
    return mean.float(), torch.rsqrt(variance + eps).float()


def batch_norm_elemt(
    values: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    result = (values - wide(mean, values)) * wide(invstd, values)
    if weight is not None:
        result = result * wide(weight, values) + wide(bias, values)
    return result.to(values.dtype)


def batch_norm_backward_reduce(
    gradient: Tensor, values: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *_wanted: bool
) -> Any:
    of_gradient = gradient.sum(others(values))
    of_product = (gradient * (values - wide(mean, values))).sum(others(values))
    by = invstd if weight is None else invstd.to(weight.dtype)
    return of_gradient, of_product, of_product * by, of_gradient


def batch_norm_backward_elemt(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Any,
    of_gradient: Tensor,
    of_product: Tensor,
    counts: Tensor,
) -> Tensor:
    n = counts.sum()
    shift = (values - wide(mean, values)) * wide(invstd**2 * of_product / n, values)
    scale = invstd if weight is None else invstd * weight
    return (gradient - wide(of_gradient / n, values) - shift) * wide(scale, values)


KERNELS = (
    batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt,
    batch_norm_backward_reduce, batch_norm_backward_elemt,
)  # fmt: skip
