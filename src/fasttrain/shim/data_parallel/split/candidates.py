"""Guesses at the batch dimensions of a call's arguments, from their sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.hooks.containers import (
    attributes_of,
    holds_by_attributes,
    items_of,
)

# The batch dimension of each tensor of a call; None for a tensor that isn't split.
Dimensions = tuple[int | None, ...]
MOST_GUESSES = 6  # guesses tried per call


def candidates(inputs: Sequence[Tensor], world_size: int) -> list[Dimensions]:
    """Return guesses from sizes at the batch dimensions, likelier ones first; a trial decides.

    Args:
        inputs: The tensors among the arguments of a call.
        world_size: Number of ranks; a batch of fewer rows isn't split.
    """
    found = dict.fromkeys(_guesses(inputs))
    return [dims for dims in found if _rows(inputs, dims) >= world_size][:MOST_GUESSES]


def cut_alike(dims: Dimensions, entries: Sequence[str]) -> bool:
    """True if a guess cuts all entries of a list alike, or none, and so for those of a tuple.

    Entries of other sizes are samples, such as the boxes of each image. One of them alone is no
    batch, but its rows may agree by chance, as they do where an L1 loss is linear.

    Args:
        dims: The guess.
        entries: A result of `list_entries`.
    """
    found: dict[str, int | None] = {}
    return all(
        found.setdefault(entry, dim) == dim
        for entry, dim in zip(entries, dims, strict=True)
        if entry
    )


def list_entries(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return for each tensor of a call which others have its place in entries of the same list.

    Those have the same text; it is empty for a tensor outside of lists.
    """
    return list(_entries({**dict(enumerate(args)), **kwargs}, ""))


def _entries(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{path} {value.dim()}" if OF_LIST in path or _OF_TUPLE in path else ""
        return
    kinds = (dict, Tensor) if type(value) is tuple else ()
    items: Any = ()
    if isinstance(value, list | deque):
        items = ((OF_LIST, item) for item in value)
    elif kinds and all(isinstance(item, kinds) for item in value):  # as `zip(*batch)` gives it
        items = ((_OF_TUPLE, item) for item in value)
    elif isinstance(value, tuple):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = items_of(value).items()
    elif holds_by_attributes(value):
        items = attributes_of(value).items()
    for key, item in items:
        yield from _entries(item, f"{path}/{key}")


OF_LIST, _OF_TUPLE = "[*]", "(*)"  # any entry


def has_few_rows(inputs: Sequence[Tensor], world_size: int) -> bool:
    """True if the first dimension of every tensor is smaller than the number of ranks."""
    sizes = [tensor.size(0) for tensor in inputs if _has_rows(tensor)]
    return bool(sizes) and max(sizes) < world_size


def row_count(inputs: Sequence[Tensor], dims: Dimensions) -> int:
    """Return the number of rows in a call's batch; 0 if the arguments' sizes differ."""
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
    """True if rows can be cut out of a tensor."""
    return bool(tensor.dim()) and tensor.layout is torch.strided and not tensor.is_nested


def _dims(inputs: Sequence[Tensor], split: dict[int, int]) -> Dimensions:
    return tuple(split.get(at) for at in range(len(inputs)))
