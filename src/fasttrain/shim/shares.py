"""Cuts a batch among the ranks: what each gets, and how much it counts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a batch.

    Attributes:
        count: Samples that this rank trains on.
        total: Samples that all ranks train on.
    """

    count: int
    total: int


def bounds(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Give first and last-but-one sample of a rank; the first ranks get what is left over."""
    each, over = divmod(size, world_size)
    first = rank * each + min(rank, over)
    return first, first + each + (rank < over)


def cut_indices(batch: Any, rank: int, world_size: int) -> tuple[Any, Share]:
    """Give a rank's part of a batch of indices, in their order.

    A rank for which none is left gets the first one, which then counts nothing: it has to take
    part in the step like the others.
    """
    first, end = bounds(len(batch), rank, world_size)
    share = Share(end - first, len(batch))
    return (batch[first:end] if share.count else batch[:1]), share


def deal_batches(batches: Iterator[Any], rank: int, world_size: int) -> Iterator[tuple[Any, Share]]:
    """Give every rank a whole batch in turn; one for which none is left counts nothing."""
    while hand := list(islice(batches, world_size)):
        mine = hand[min(rank, len(hand) - 1)]
        yield mine, Share(len(mine) if rank < len(hand) else 0, sum(map(len, hand)))


def cut_data(data: Any, rank: int, world_size: int) -> tuple[Any, Share] | None:
    """Give a rank's part of a batch that is read already; None for one that can't be cut."""
    sizes = set(_sizes(data))
    if len(sizes) != 1 or None in sizes:
        return None
    size: int = sizes.pop() or 0
    first, end = bounds(size, rank, world_size)
    share = Share(end - first, size)
    return _sliced(data, size, slice(first, end) if share.count else slice(0, 1)), share


def _sizes(data: Any) -> Iterator[int | None]:
    """Give the number of samples in each part of a batch; None for a part that can't be cut."""
    if isinstance(data, Tensor):
        yield data.size(0) if data.dim() else None
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _sizes(value)
    elif isinstance(data, list | tuple) and data:
        if all(isinstance(value, str | bytes | int | float) for value in data):
            yield len(data)
        else:
            for value in data:
                yield from _sizes(value)
    elif data is not None:
        yield None


def _sliced(data: Any, size: int, part: slice) -> Any:
    if isinstance(data, Tensor):
        return data[part]
    if isinstance(data, Mapping):
        result: Any = copy.copy(data)
        for key, value in data.items():
            result[key] = _sliced(value, size, part)
        return result
    if isinstance(data, list | tuple):
        if all(isinstance(value, str | bytes | int | float) for value in data):
            return data[part]
        parts = [_sliced(value, size, part) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return data
