"""Runs a call in fp64, with the random numbers that it draws in its own precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MODE: Any = TorchDispatchMode  # without annotations
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
# Tagged as drawing although they do more, or don't draw at all; their kernels take few dtypes.
_LARGER = ("attention", "rnn")
_DROPOUT: Any = torch.ops.aten.native_dropout.default
_CAST: Any = torch.ops.aten._to_copy.default
_BITS: Any = torch.ops.aten.view.dtype  # reads the bits of a number as another type


class SameDraws(_MODE):  # type: ignore[misc]
    """Dispatch mode in which operators draw the random numbers that they draw in one dtype.

    Which numbers come from one state of a generator depends on the dtype that they are drawn in:
    of ``normal_`` on a CPU, and on CUDA even of dropout. Operators in another dtype get those of
    ``dtype``, rounded.

    Args:
        dtype: The dtype to draw in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func):
            return self._drawn(func, args, kwargs)
        return self._computed(func, args, kwargs)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        dtype = self._result_of(args, kwargs)
        if func is _DROPOUT:
            return self._dropped(func, *args, dtype=dtype)
        written = _written(func, args, kwargs)
        if any(not t.is_floating_point() for t in written):
            return func(*args, **kwargs)  # integers
        drawn: dict[int, Tensor] = {}
        output = func(*_mapped(_casts(self._dtype, drawn), args),
                      **_mapped(_casts(self._dtype, drawn), kwargs))  # fmt: skip
        for tensor in written:
            tensor.copy_(drawn[id(tensor)])
        if written:
            return written[0] if len(written) == 1 else tuple(written)
        return _mapped(_casts(dtype, {}), output)

    def _dropped(self, func: Any, x: Tensor, p: float, train: Any, *, dtype: torch.dtype) -> Any:
        _, mask = func(x.to(self._dtype), p, train)
        kept = x.to(dtype) * mask if p < 1 else torch.zeros_like(x, dtype=dtype)
        return (kept / (1 - p) if train is not False and p < 1 else x.to(dtype)), mask

    def _result_of(self, args: Any, kwargs: Any) -> torch.dtype:
        """Return the dtype that an operator's result would have."""
        asked = kwargs.get("dtype")
        given = [a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        return asked or (given[0] if given else torch.get_default_dtype())


class InDouble(SameDraws):
    """Dispatch mode that computes in fp64 what the script asks for in fp32, fp16 or bf16."""

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _BITS or _narrows_gradient(func, kwargs):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        widen = _widens({id(tensor) for tensor in written})
        output = func(*_mapped(widen, args), **_mapped(widen, kwargs))
        # Operators like `zeros` have the default dtype; a view or a tensor in place stays one.
        aliased = any(r.alias_info is not None for r in func._schema.returns)
        return output if aliased else _mapped(_widens(set()), output)

    def _result_of(self, *_: Any) -> torch.dtype:
        return torch.float64


class Rounded(InDouble):
    """Dispatch mode that computes in fp64 and rounds each result at random.

    The results scatter as far as rounding explains: also where rounding decides on which side of a
    kink a number is, as in ReLU, and where what is large cancels out. That is Monte Carlo
    arithmetic.

    Source: D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997.

    Args:
        dtype: The dtype to draw in.
        unit_roundoff: The largest relative error of a result.
        weights: Tensors to round whenever they are used.
        seed: Which errors.
    """

    def __init__(
        self, dtype: torch.dtype, unit_roundoff: float, weights: Iterable[Tensor], seed: int
    ) -> None:
        super().__init__(dtype)
        self._unit_roundoff = unit_roundoff
        self._weights = {_memory(tensor) for tensor in weights} - {0}
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if any(r.alias_info is not None for r in func._schema.returns):
            return super()._computed(func, args, kwargs)  # a view, or in place
        args = _mapped(self._rounded_weight, args)
        return _mapped(self._rounded, super()._computed(func, args, kwargs))

    def _rounded_weight(self, value: Any) -> Any:
        used = isinstance(value, Tensor) and _memory(value) in self._weights
        return self._rounded(value) if used else value

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        if value.is_complex():
            parts = torch.view_as_real(value.resolve_conj())
            return torch.view_as_complex(self._rounded(parts).contiguous())
        if not value.is_floating_point():
            return value
        errors = torch.empty_like(value).uniform_(-1, 1, generator=self._generator(value.device))
        return value * errors.mul_(self._unit_roundoff).add_(1)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _narrows_gradient(func: Any, kwargs: Any) -> bool:
    """True if a gradient is cast to fp32 in a backward pass, as that of a leaf in fp32 must be."""
    casts = func is _CAST and kwargs.get("dtype") in (torch.float32, torch.complex64)
    return casts and torch._C._current_graph_task_id() != -1


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def draws(func: Any) -> bool:
    """True for an operator that draws random numbers and does little else."""
    name = func._schema.name
    tagged = torch.Tag.nondeterministic_seeded in func.tags
    return tagged and not any(word in name for word in _LARGER)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    found: list[Tensor] = []
    for at, parameter in enumerate(func._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(parameter.name)
            items = value if isinstance(value, list | tuple) else [value]
            found += [item for item in items if isinstance(item, Tensor)]
    return found


def _casts(dtype: torch.dtype, made: dict[int, Tensor]) -> Callable[[Any], Any]:
    """Return a function that casts floating-point tensors and dtypes, and notes the tensors."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            made[id(value)] = value.to(dtype)
            return made[id(value)]
        return dtype if isinstance(value, torch.dtype) and value.is_floating_point else value

    return cast


def _widens(left: set[int]) -> Callable[[Any], Any]:
    """Return a function that widens tensors and dtypes, but for these tensors."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _WIDE and id(value) not in left:
            return value.to(_WIDE[value.dtype])
        return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

    return widen


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to all in an operator's arguments or results."""
    if isinstance(value, dict):
        return {name: _mapped(change, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, item) for item in value])
    return change(value)
