"""Batches of tensors that the script holds itself: by one index each, and not sample by sample.

Without workers each rank reads every batch. Where that is nothing but indexing, it can be done for
a whole batch at once, with the same bits.

Source: ``torch/utils/data/dataset.py`` and ``_utils/collate.py`` of torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

_READ = TensorDataset.__getitem__, Subset.__getitem__, Subset.__getitems__


def fetches_by_index(loader: Any, fetch: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """Return what fetches the batches of a loader at once; None where that isn't the same.

    Args:
        loader: Reads in this process.
        fetch: Fetches one of its batches, by a list of indices.
    """
    taken = _taken(loader.dataset)
    known = (TensorDataset.__getitem__, Subset.__getitem__, Subset.__getitems__) == _READ
    if taken is None or not known or not loader._auto_collation:
        return None
    if loader.collate_fn is not default_collate:
        return None
    tensors, places = taken
    return functools.partial(_fetch, fetch, tensors, places)


def _taken(dataset: Any) -> tuple[Sequence[Tensor], list[Sequence[int]]] | None:
    """Return the tensors of a dataset, and the places in which each subset of it lies."""
    places = []
    while type(dataset) is Subset:
        places.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    return dataset.tensors, places


def _is_plain(tensor: Tensor) -> bool:
    usual = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return usual and tensor.is_contiguous() and not tensor.requires_grad


def _fetch(
    fetch: Callable[[Any], Any],
    tensors: Sequence[Tensor],
    places: list[Sequence[int]],
    index: Any,
) -> Any:
    numbers = index
    for place in places:
        if set(map(type, numbers)) != {int}:
            return fetch(index)
        numbers = [place[number] for number in numbers]
    if set(map(type, numbers)) != {int} or not all(map(_is_plain, tensors)):
        return fetch(index)
    size = len(tensors[0])
    if min(numbers) < -size or max(numbers) >= size:
        return fetch(index)  # which raises what a script may wait for
    at = torch.tensor(numbers).remainder_(size)
    return [tensor.index_select(0, at.to(tensor.device)) for tensor in tensors]
