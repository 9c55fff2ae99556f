"""Numbers by which a change of tensors shows, whoever has changed them.

Versions don't count what is written through ``.data``, as an ActNorm does that sets itself up by
its first batch.
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
    """Return two numbers for each tensor; they are those of this process where it is sharded.

    Of one that isn't strided there are two for each tensor that it is made of.
    """
    with torch.no_grad():
        known = [_wide(part) for tensor in tensors for part in strided_parts(_own(tensor))]
        sums = [number for part in known for number in (part.sum(), torch.linalg.vector_norm(part))]
        found = [float(number.real) for number in _to_cpu(sums)]
    return [0.0 if number != number else number for number in found]  # NaN is no other than NaN


def _to_cpu(numbers: list[Tensor]) -> list[Any]:
    """Return numbers of any dtype and device, with one copy for each of these."""
    alike: dict[Any, list[int]] = {}
    for index, number in enumerate(numbers):
        alike.setdefault((number.device, number.dtype), []).append(index)
    found: list[Any] = [0.0] * len(numbers)
    for places in alike.values():
        values = torch.stack([numbers[index] for index in places]).tolist()
        for index, value in zip(places, values, strict=True):
            found[index] = value
    return found


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that a tensor is made of: itself, or its indices and values.

    What is neither sparse nor nested in a way that is known has no parts.
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
    """Return whether rows of a tensor can be had as a tensor of its kind."""
    if tensor.is_nested:
        return tensor.layout is torch.jagged
    return tensor.layout in (torch.strided, torch.sparse_coo) and not tensor.is_quantized


def _own(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor."""
    values: Any = tensor.detach()
    own: Tensor = values.to_local() if hasattr(values, "to_local") else values
    return own


def _wide(values: Tensor) -> Tensor:
    """Return a tensor in a dtype that sums and norms are made of."""
    return values if values.is_complex() or values.dtype in _SUMMED else values.float()
