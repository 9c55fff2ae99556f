"""Numbers by which a change of tensors shows, whoever has changed them.

Versions don't count what is written through ``.data``, as an ActNorm does that sets itself up by
its first batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_SUMMED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def sums_of(tensors: Iterable[Tensor]) -> list[float]:
    """Return two numbers for each tensor; they are those of this process where it is sharded."""
    with torch.no_grad():
        known = [_own_part(tensor) for tensor in tensors]
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


def _own_part(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor, in a dtype that sums and norms are made of."""
    values: Any = tensor.detach()
    if hasattr(values, "to_local"):
        values = values.to_local()
    if values.layout != torch.strided:
        values = values.coalesce().values()
    wide = values.is_complex() or values.dtype in _SUMMED
    plain: Tensor = values if wide else values.float()
    return plain
