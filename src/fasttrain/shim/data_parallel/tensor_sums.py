"""Checksums of tensors, which show a change whoever has made it.

A tensor's version counter isn't enough: it doesn't count writes through ``.data``, by which an
ActNorm initialises itself from its first batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS: dict[Any, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS,
}  # fmt: skip
_SUMMED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def sums_of(tensors: Iterable[Tensor]) -> list[float]:
    """Return the sum and the norm of each tensor; of a sharded one, those of this process's shard.

    A tensor that isn't strided has two numbers for each tensor that it is made of, and one whose
    memory was freed, such as a parameter that FSDP has gathered, has none.
    """
    with torch.no_grad():
        parts = [part for tensor in tensors for part in strided_parts(_own(tensor))]
        known = [_wide(part) for part in parts if _has_memory(part)]
        sums = [number for part in known for number in (part.sum(), torch.linalg.vector_norm(part))]
        found = [float(number.real) for number in values_of(sums)]
    return [0.0 if number != number else number for number in found]  # so that NaN equals NaN


def values_of(numbers: list[Tensor]) -> list[Any]:
    """Return the values of scalars, with one copy to the CPU per device and dtype."""
    groups: dict[Any, list[int]] = {}
    for index, number in enumerate(numbers):
        groups.setdefault((number.device, number.dtype), []).append(index)
    found: list[Any] = [0.0] * len(numbers)
    for places in groups.values():
        values = torch.stack([numbers[index] for index in places]).tolist()
        for index, value in zip(places, values, strict=True):
            found[index] = value
    return found


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that a tensor is made of: itself, or its indices and values.

    A tensor of any other layout has no parts.
    """
    values: Any = tensor
    if values.layout is torch.strided and not (values.is_nested or values.is_quantized):
        return [tensor]
    if values.is_quantized:
        return [values.int_repr()]
    if values.is_nested:
        return [values.values()]
    for layout, names in _PARTS.items():
        if values.layout is layout:
            return [getattr(values, name)() for name in names]
    return []


def can_be_cut(tensor: Tensor) -> bool:
    """True if some rows of a tensor can be cut out as a tensor of the same layout."""
    if tensor.is_nested:
        return tensor.layout is torch.jagged
    return tensor.layout in (torch.strided, torch.sparse_coo) and not tensor.is_quantized


def _own(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    values: Any = tensor.detach()
    own: Tensor = values.to_local() if hasattr(values, "to_local") else values
    return own


def _has_memory(part: Tensor) -> bool:
    return bool(part.untyped_storage().nbytes()) or not part.numel()


def _wide(values: Tensor) -> Tensor:
    """Return a tensor in a dtype that supports sums and norms."""
    return values if values.is_complex() or values.dtype in _SUMMED else values.float()
