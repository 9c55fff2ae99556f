"""Inspects datasets: shared memory in them, and batches that can be read by indexing alone.

A dataset may hold a queue, a shared value or shared tensors through which its workers send the
script other data than batches. Only the rank that starts the workers would get these data.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fasttrain.shim.hooks.reachable import CLOSED, children_of
from fasttrain.shim.process.callsite import own_prefixes

MOST = 5_000  # objects per search
_MODULES = tuple(
    f"multiprocessing.{name}"
    for name in ("queues", "sharedctypes", "managers", "connection", "shared_memory", "pool")
)
_EVENTS = ("Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier")
_CTYPES = (ctypes.Array, ctypes._SimpleCData, ctypes.Structure)
_SKIPPED = (*(kind for kind in CLOSED if kind is not Tensor), DataLoader, _BaseDataLoaderIter)


def shared_memory_of(loader: Any) -> str:
    """Return the kind of the first object that a loader's workers share with the script, or ''."""
    pending = deque([loader.dataset, loader.collate_fn, loader.worker_init_fn])
    seen = {id(start) for start in pending}
    while pending and len(seen) < MOST:
        holder = pending.popleft()
        if kind := _shared(holder):
            return kind
        try:
            children = list(_children(holder))
        except Exception:  # noqa: BLE001, S112 - objects of any kind
            continue
        for child in children:
            if id(child) not in seen and not issubclass(type(child), _SKIPPED):
                seen.add(id(child))
                pending.append(child)
    return ""


def _shared(holder: Any) -> str:
    kind = type(holder)
    if issubclass(kind, Tensor):
        return "a shared tensor" if holder.is_cpu and holder.is_shared() else ""
    named = f"{kind.__module__.removeprefix('multiprocessing.')}.{kind.__qualname__}"
    if any(base.__module__ in _MODULES for base in kind.__mro__) or issubclass(kind, _CTYPES):
        return named
    if kind.__module__ == "multiprocessing.synchronize" and kind.__name__ in _EVENTS:
        return named
    writable = issubclass(kind, mmap.mmap) and not memoryview(holder).readonly
    return "mmap.mmap" if writable else ""


def _children(holder: Any) -> Iterator[Any]:
    kind = type(holder)
    if kind is FunctionType:
        yield from holder.__defaults__ or ()
        yield from holder.__closure__ or ()
        if not holder.__code__.co_filename.startswith(own_prefixes()):
            names = set(_names(holder.__code__))
            yield from (v for k, v in holder.__globals__.items() if k in names)
    elif kind.__module__ == "numpy":
        if kind.__name__ != "memmap":  # its base is a mapped file, which all ranks can read
            yield getattr(holder, "base", None)
    elif kind is memoryview:
        yield holder.obj
    elif kind is not Tensor:
        yield from (child for child, _ in children_of(holder, kind))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function uses, and the functions inside of it."""
    yield from code.co_names
    for inner in code.co_consts:
        if inspect.iscode(inner):
            yield from _names(inner)


# torch's own methods, to detect that a script has replaced one.
_READ = TensorDataset.__getitem__, Subset.__getitem__, Subset.__getitems__


def fetches_by_index(loader: Any, fetch: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """Return a fetcher that indexes whole batches; None if its results could differ.

    Without workers each rank reads every batch. If reading is only indexing of tensors, a whole
    batch can be indexed at once instead of sample by sample, with equal bits.

    Source: ``torch/utils/data/dataset.py`` and ``_utils/collate.py`` of torch 2.13.

    Args:
        loader: A loader that reads in this process.
        fetch: Its own fetcher: returns a batch, by a list of indices.
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
    """Return a dataset's tensors, and the indices of each `Subset` around it, outermost first."""
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
        return fetch(index)  # torch raises the IndexError that a script may catch
    at = torch.tensor(numbers).remainder_(size)
    return [tensor.index_select(0, at.to(tensor.device)) for tensor in tensors]
