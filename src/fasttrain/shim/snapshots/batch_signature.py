"""What batches look like: the shapes of their tensors, and the numbers and words beside them.

A script counts tokens by a shape, or by lengths in a list. So a replayed batch looks like the one
that it stands for; only what is in its tensors is another's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.hooks.casting import map_tensors
from fasttrain.shim.snapshots.errors import refuse_diverged
from fasttrain.shim.snapshots.scalar_reads import KEPT_BYTES

Look = Any  # a torch.Size for a tensor, a tuple for a container, a plain value for itself

_VALUES = (int, float, bool, type(None), bytes)


def look_of(data: Any) -> Look:
    """Return what a batch looks like, as something that can be compared and hashed."""
    if isinstance(data, Tensor):
        return data.shape
    if type(data) is str:
        return sys.intern(data)  # it comes again, epoch for epoch
    if type(data) in _VALUES:
        return data
    if isinstance(data, list | tuple):
        return ("items", *map(look_of, data))
    if isinstance(data, Mapping):
        return ("mapping", *((str(key), look_of(value)) for key, value in data.items()))
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(data, numpy.generic | numpy.ndarray) and _is_small(data):
        return ("array", data.dtype.str, data.shape, data.tobytes().decode("latin-1"))
    return ("other", type(data).__qualname__)


def _is_small(array: Any) -> bool:
    return array.nbytes <= KEPT_BYTES and not array.dtype.hasobject


def _array(dtype: str, shape: tuple[int, ...], content: str) -> Any:
    numpy = sys.modules["numpy"]  # which torch imports, where it is there
    return numpy.frombuffer(bytearray(content, "latin-1"), dtype).reshape(shape)[()]


def plain_look(look: Look) -> Any:
    """Give it in plain types."""
    if isinstance(look, torch.Size):
        return ("shape", *look)
    return tuple(map(plain_look, look)) if isinstance(look, tuple) else look


def made_like(seen: Any, look: Any) -> Any:
    """Return a batch that looks like another, with tensors of one that was seen.

    Args:
        seen: The one that was seen.
        look: What `plain_look` gave for the other.

    Raises:
        SystemExit: ``snapshot-diverged`` where it can't be made, as it holds other things.
    """
    kind = look[0] if isinstance(look, tuple) else None
    if kind == "shape" and isinstance(seen, Tensor) and seen.dim() == len(look) - 1:
        return _resized(seen, look[1:])
    if kind == "items" and isinstance(seen, list | tuple) and (seen or len(look) == 1):
        items = [made_like(seen[i % len(seen)], one) for i, one in enumerate(look[1:])]
        return type(seen)(*items) if hasattr(seen, "_fields") else type(seen)(items)
    if kind == "mapping" and isinstance(seen, Mapping) and len(seen) == len(look) - 1:
        made: Any = copy.copy(seen)
        for key, (_, one) in zip(seen, look[1:], strict=True):
            made[key] = made_like(seen[key], one)
        return made
    if kind == "other":
        return map_tensors(seen, Tensor.clone)
    if kind == "array":
        return _array(*look[1:])
    if kind is not None or isinstance(seen, Tensor | list | tuple | Mapping):
        refuse_diverged("a DataLoader gives a batch of other parts than it gave then")
    return look


def _resized(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a copy of a shape, cut or repeated; the script may change it in place."""
    if tensor.shape == shape:
        return tensor.clone()
    for dim, size in enumerate(shape):
        if tensor.size(dim) != size:
            there = torch.arange(size, device=tensor.device) % max(tensor.size(dim), 1)
            if size and not tensor.size(dim):
                return tensor.new_zeros(shape)
            tensor = tensor.index_select(dim, there)
    return tensor
