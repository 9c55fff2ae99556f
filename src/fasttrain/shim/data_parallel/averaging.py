"""Averages gradients over the ranks without DistributedDataParallel, with the same result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttrain.shim.data_parallel.ranks import Ranks


def average_gradients(parameters: Sequence[Tensor], ranks: Ranks) -> list[int]:
    """Replace each ``.grad`` by its mean over all ranks; return how many ranks had each.

    A rank without a gradient counts as zeros; if no rank has one, it stays None. Averaging twice is
    harmless: equal gradients are their own mean, and what was added since is averaged then.
    """
    if not parameters:
        return []
    device = parameters[0].device
    present = [float(p.grad is not None) for p in parameters]
    counts = ranks.sum(torch.tensor(present, device=device)).tolist()
    dense: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for parameter, count in zip(parameters, counts, strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                parameter.grad = _average_sparse(parameter.grad, ranks)
            else:
                key = (parameter.device, parameter.grad.dtype)
                dense.setdefault(key, []).append(parameter.grad)
        for gradients in dense.values():
            _average_dense(gradients, ranks)
    return [int(count) for count in counts]


def _average_dense(gradients: list[Tensor], ranks: Ranks) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat.div_(ranks.world_size)
    ranks.sum(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _average_sparse(gradient: Tensor, ranks: Ranks) -> Tensor:
    return ranks.sum(gradient.coalesce() / ranks.world_size)
