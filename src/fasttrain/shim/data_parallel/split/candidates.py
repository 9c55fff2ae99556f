"""Which dimension of which argument may be the batch: guesses from sizes, for a trial to decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Dimensions = tuple[int | None, ...]  # of each tensor of a call; None for one that isn't split
MOST = 6  # guesses that are tried


def candidates(inputs: Sequence[Tensor], world_size: int) -> list[Dimensions]:
    """Return guesses, the likelier ones first.

    Args:
        inputs: The tensors among the arguments of a call.
        world_size: Number of ranks; a batch of fewer rows isn't split.
    """
    found = dict.fromkeys(_guesses(inputs))
    return [dims for dims in found if _rows(inputs, dims) >= world_size][:MOST]


def row_count(inputs: Sequence[Tensor], dims: Dimensions) -> int:
    """Return the rows of a call's batch; 0 where the sizes of the arguments don't agree."""
    sizes = {
        tensor.size(dim) if tensor.dim() > dim else 0
        for tensor, dim in zip(inputs, dims, strict=True)
        if dim is not None
    }
    return sizes.pop() if len(sizes) == 1 else 0


_rows = row_count


def _guesses(inputs: Sequence[Tensor]) -> Iterator[Dimensions]:
    dense = [(at, t) for at, t in enumerate(inputs) if _has_rows(t)]
    for size in dict.fromkeys(t.size(0) for _, t in dense):
        split = [at for at, t in dense if t.size(0) == size]
        yield _dims(inputs, dict.fromkeys(split, 0))
        if len(split) > 1:
            for left_out in reversed(split):
                yield _dims(inputs, {at: 0 for at in split if at != left_out})
    for size in dict.fromkeys(t.size(1) for _, t in dense if t.dim() > 1):
        second = {at: 1 for at, t in dense if t.dim() > 1 and t.size(1) == size}
        first = {at: 0 for at, t in dense if t.dim() == 1 and t.size(0) == size}
        yield _dims(inputs, {**first, **second})


def _has_rows(tensor: Tensor) -> bool:
    """Whether a part of a tensor can be taken by its rows."""
    return bool(tensor.dim()) and tensor.layout is torch.strided and not tensor.is_nested


def _dims(inputs: Sequence[Tensor], split: dict[int, int]) -> Dimensions:
    return tuple(split.get(at) for at in range(len(inputs)))
