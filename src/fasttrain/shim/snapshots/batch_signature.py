"""A batch's signature: the shapes of its tensors, and its plain numbers and strings.

A script counts tokens by a shape, or by lengths in a list. So a replayed batch has the signature of
the batch that it stands for; only the contents of its tensors are another batch's.
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

Signature = Any  # a torch.Size for a tensor, a tuple for a container, a plain value for itself

_VALUES = (int, float, bool, type(None), bytes)


def signature_of(data: Any) -> Signature:
    """Return a batch's signature, which can be compared and hashed."""
    if isinstance(data, Tensor):
        return data.shape
    if type(data) is str:
        return sys.intern(data)  # the same strings come again in every epoch
    if type(data) in _VALUES:
        return data
    if isinstance(data, list | tuple):
        return ("items", *map(signature_of, data))
    if isinstance(data, Mapping):
        return ("mapping", *((str(key), signature_of(value)) for key, value in data.items()))
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(data, numpy.generic | numpy.ndarray) and _is_small(data):
        return ("array", data.dtype.str, data.shape, data.tobytes().decode("latin-1"))
    return ("other", type(data).__qualname__)


def _is_small(array: Any) -> bool:
    return array.nbytes <= KEPT_BYTES and not array.dtype.hasobject


def _array(dtype: str, shape: tuple[int, ...], content: str) -> Any:
    numpy = sys.modules["numpy"]  # torch imports it if it is installed
    return numpy.frombuffer(bytearray(content, "latin-1"), dtype).reshape(shape)[()]


def plain_signature(signature: Signature) -> Any:
    """Return a signature in plain types, as a snapshot holds it."""
    if isinstance(signature, torch.Size):
        return ("shape", *signature)
    return tuple(map(plain_signature, signature)) if isinstance(signature, tuple) else signature


def made_like(seen: Any, signature: Any) -> Any:
    """Return a batch with a given signature, whose contents come from a batch that was seen.

    Args:
        seen: The batch that was seen.
        signature: The signature, in plain types.

    Raises:
        SystemExit: ``snapshot-diverged`` if the two have different parts.
    """
    kind = signature[0] if isinstance(signature, tuple) else None
    if kind == "shape" and isinstance(seen, Tensor) and seen.dim() == len(signature) - 1:
        return _resized(seen, signature[1:])
    if kind == "items" and isinstance(seen, list | tuple) and (seen or len(signature) == 1):
        items = [made_like(seen[i % len(seen)], one) for i, one in enumerate(signature[1:])]
        return type(seen)(*items) if hasattr(seen, "_fields") else type(seen)(items)
    if kind == "mapping" and isinstance(seen, Mapping) and len(seen) == len(signature) - 1:
        made: Any = copy.copy(seen)
        for key, (_, one) in zip(seen, signature[1:], strict=True):
            made[key] = made_like(seen[key], one)
        return made
    if kind == "other":
        return map_tensors(seen, Tensor.clone)
    if kind == "array":
        return _array(*signature[1:])
    if kind is not None or isinstance(seen, Tensor | list | tuple | Mapping):
        refuse_diverged("a DataLoader yields a batch with other parts than then")
    return signature


def _resized(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a copy, cut or repeated to a shape; a copy, as the script may change it in place."""
    if tensor.shape == shape:
        return tensor.clone()
    for dim, size in enumerate(shape):
        if tensor.size(dim) != size:
            there = torch.arange(size, device=tensor.device) % max(tensor.size(dim), 1)
            if size and not tensor.size(dim):
                return tensor.new_zeros(shape)
            tensor = tensor.index_select(dim, there)
    return tensor
