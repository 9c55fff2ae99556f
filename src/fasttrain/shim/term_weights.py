"""What one term of a loss counts for, and what its gradient is multiplied by for that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.reductions import Term
from fasttrain.shim.shares import Share


def weight_of(term: Term, share: Share, like: Tensor) -> Tensor:
    """Give what a term counts for against the same one of another rank."""
    # Accelerators are slow in fp64, and hccl adds up none.
    dtype = torch.float64 if like.device.type == "cpu" else torch.float32
    if isinstance(term.weight, Tensor) and share.count:
        return term.weight.detach().to(like.device, dtype)
    own = share.count if term.weight is None else float(term.weight) * bool(share.count)
    own = float(bool(share.count)) if term.kind == "sum" else own
    own = 1.0 if term.kind == "same" else own
    return torch.tensor(own, dtype=dtype, device=like.device)


def of_means(weights: Tensor, terms: list[Term]) -> Tensor:
    """Give the weights with 0 in place of those of sums, which are not what a mean is over."""
    sums = [term.kind == "sum" for term in terms]
    return (
        weights.masked_fill(torch.tensor(sums, device=weights.device), 0.0)
        if any(sums)
        else (weights)
    )


def apply_factors(parts: list[Term], factors: list[Any]) -> Tensor | float:
    """Give one factor for a loss; where its terms differ, put each on its own term."""
    if len(parts) == 1 or _all_equal(parts, factors):
        found: Tensor | float = factors[0]
        return found
    for term, factor in zip(parts, factors, strict=True):
        term.node.register_prehook(partial(_multiplied, factor))
    return 1.0


def is_one_mean(losses: Sequence[Tensor], terms: list[list[Term]]) -> bool:
    """Whether one factor puts a pass right; on a GPU the host doesn't wait for sums anyway."""
    parts = terms[0]
    one = len(losses) == len(parts) == 1 and parts[0].kind == "mean"
    return one and parts[0].node is not None and losses[0].device.type == "cpu"


def _all_equal(parts: list[Term], factors: list[Any]) -> bool:
    """Whether all terms have one factor, as far as can be seen without waiting for a GPU."""
    if all(isinstance(factor, float) or factor.device.type == "cpu" for factor in factors):
        return len({float(factor) for factor in factors}) == 1
    numbers = {None if isinstance(t.weight, Tensor) else t.weight for t in parts}
    return len(numbers) == 1 and None not in numbers and all(t.kind == "mean" for t in parts)


def amounts_of(loss: Tensor, parts: list[Term]) -> Tensor:
    """Give what each term contributes to a loss; what can't be found is the first one's."""
    found = [None if len(parts) == 1 else term.value() for term in parts]
    rest = loss.detach().reshape(()) - sum(value for value in found if value is not None)
    unknown = next((i for i, value in enumerate(found) if value is None), 0)
    values = [torch.zeros_like(rest) if value is None else value.reshape(()) for value in found]
    values[unknown] = values[unknown] + rest
    return torch.stack([value.to(rest.dtype) for value in values])


def _multiplied(factor: Tensor | float, gradients: tuple[Tensor | None, ...]) -> Any:
    return tuple(None if g is None else (g * factor).to(g.dtype) for g in gradients)
