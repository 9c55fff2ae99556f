"""Compares a split call's results with the whole call's, and finds which tensors have rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.data_parallel.split.rows import Rows
from fasttrain.shim.hooks.containers import attributes_of, holds_by_attributes, items_of

# Relative difference that two sums of the same numbers in another order may have: some thousand
# roundings, as in a deep model. A tensor of a single number was reduced, and may have a tenth.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
_OF_NUMBERS = 0.1
_NEAR = 100.0  # multiple of what is allowed up to which rounding may be the cause
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice, range,
)  # fmt: skip


class DisagreementError(Exception):
    """Raised if the split call's results differ; the message says how.

    Attributes:
        near: True if rounding may be the cause.
    """

    def __init__(self, why: str, *, near: bool = False) -> None:
        super().__init__(why)
        self.near = near


def structure_of(value: Any) -> Any:
    """Return a value's containers and everything in them but tensors, to be compared by ==."""
    kind = type(value)
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, _PLAIN):
        return kind, value
    if isinstance(value, tuple | list | deque):
        return kind, [structure_of(item) for item in value]
    if isinstance(value, Mapping):
        return kind, [(key, structure_of(item)) for key, item in items_of(value).items()]
    if holds_by_attributes(value):
        return kind, [(name, structure_of(item)) for name, item in attributes_of(value).items()]
    return _Same(value)


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any], *, texts: bool = True) -> Any:
    """Return a hashable key for a kind of call: arguments without numbers and tensors' values.

    Args:
        args: Arguments.
        kwargs: Keyword arguments.
        texts: Whether an argument that is a text, such as a mode, counts by its value.
    """
    by_value = bool | str if texts else bool
    named = [(str(key), _argument(value, by_value)) for key, value in kwargs.items()]
    return tuple([_argument(value, by_value) for value in args]), tuple(named)


def _argument(value: Any, by_value: Any) -> Any:
    return value if isinstance(value, by_value) else _kind_of(value)


def _kind_of(value: Any) -> Any:
    """Return the same of one value; inside of arguments are file names, or a flag for each row."""
    kind = type(value)
    if isinstance(value, Tensor):
        return value.dim(), value.dtype, value.requires_grad
    if isinstance(value, tuple | list | deque):
        return kind, *map(_kind_of, value)
    if isinstance(value, Mapping):
        return kind, *((str(key), _kind_of(item)) for key, item in items_of(value).items())
    if holds_by_attributes(value):
        return kind, *((name, _kind_of(item)) for name, item in attributes_of(value).items())
    return kind


class _Same:
    """An object that equals only itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


def row_dimensions(whole: Sequence[Tensor], part: Sequence[Tensor], rows: Rows) -> list[int | None]:
    """Return the dimension of each tensor of a split call that has rows; None for one without.

    Raises:
        DisagreementError: If a tensor's shape is neither the whole one nor that of the rank's rows.
    """
    return [_row_dimension(*pair, rows) for pair in zip(whole, part, strict=True)]


def _row_dimension(whole: Tensor, part: Tensor, rows: Rows) -> int | None:
    if whole.dtype != part.dtype or whole.dim() != part.dim() or whole.layout != part.layout:
        raise DisagreementError(
            f"a tensor of another kind: {_described(part)} instead of {_described(whole)}"
        )
    pairs = list(zip(whole.shape, part.shape, strict=True))
    others = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    if not others:
        return None
    dim = others[0]
    a, b = pairs[dim]
    if len(others) > 1 or a % rows.count or a // rows.count * rows.own != b:
        raise DisagreementError(f"a tensor of shape {tuple(part.shape)} for {tuple(whole.shape)}")
    return dim


def check_equal(
    whole: Sequence[Tensor | None],
    given: Sequence[Tensor | None],
    what: str,
    floor: float = 0.0,
    near: float = _NEAR,
) -> None:
    """Check that tensors are equal up to rounding.

    Args:
        whole: Those of the whole call.
        given: Those of the split call, gathered.
        what: What they are, for the message.
        floor: An absolute difference that is allowed.
        near: The multiple of the allowed difference up to which rounding may be the cause.

    Raises:
        DisagreementError: If some tensor isn't.
    """
    for one, other in zip(whole, given, strict=True):
        if one is None or other is None:
            if one is not other and largest(one if other is None else other) > floor:
                raise DisagreementError(
                    f"{what} are missing, or present where the whole call has none"
                )
        elif (off := _difference(one, other, floor)) > 1:
            far = f"{off:.2g} times the rounding error"
            why = f"different {what} (shape {tuple(one.shape)}, {far})"
            raise DisagreementError(why, near=off <= near)


def _difference(whole: Tensor, given: Tensor, floor: float) -> float:
    """Return the largest difference in multiples of the allowed one."""
    whole, given = whole.detach(), given.detach()
    if whole.layout != torch.strided:
        whole, given = whole.to_dense(), given.to_dense()
    if not whole.numel():
        return 0.0
    if not (whole.is_floating_point() or whole.is_complex()):
        return 0.0 if torch.equal(whole, given) else float("inf")
    tolerance = _TOLERANCE.get(whole.dtype, _TOLERANCE[torch.float32])
    if whole.numel() == 1:
        tolerance *= _OF_NUMBERS
    wide = _wide(whole.dtype)
    off = _largest_of(whole.to(wide), given.to(wide), tolerance, floor)
    if math.isfinite(off):
        return off
    # Some numbers are infinite, or too large for a sum of squares.
    finite = torch.isfinite(whole)
    if not torch.allclose(whole[~finite], given[~finite], equal_nan=True):
        return float("inf")
    wide = torch.complex128 if whole.is_complex() else torch.float64
    a, b = (torch.where(finite, tensor, 0).to(wide) for tensor in (whole, given))
    off = _largest_of(a, b, tolerance, floor)
    return off if math.isfinite(off) else float("inf")


def _largest_of(a: Tensor, b: Tensor, tolerance: float, floor: float) -> float:
    """Return the same, but not finite if a number or the sum of squares isn't."""
    size = a.abs()
    typical = float(size.norm()) / math.sqrt(size.numel())
    if not math.isfinite(typical):
        return math.nan
    allowed = size.mul_(tolerance).add_(tolerance * typical + floor).clamp_(min=1e-30)
    return float((a - b).abs().div_(allowed).max())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex or dtype is torch.float64 else torch.float32


def largest(tensor: Tensor | None) -> float:
    """Return the largest absolute value in a tensor; 0 for None or no elements."""
    if tensor is None or not tensor.numel():
        return 0.0
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return float(dense.detach().abs().max())


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
