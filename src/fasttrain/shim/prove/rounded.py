"""Rounds the results of a model's calls and of backward passes at random.

A run in which that is done goes as far from the plain one as rounding explains. It is what a lever
that rounds may do: autocast, or a compiled model that adds up in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.roots import Call, Root, RootCalls, parameters_of
from fasttrain.shim.hooks.seams import Differentiating
from fasttrain.shim.tune.double import draws

_MODE: Any = TorchDispatchMode  # without annotations
_ERRORS = 1 << 20  # they are drawn once, and used from another place each time
LOW = 2.0**-12  # from here on it is a lower precision, and no other order of sums
# What autocast computes in fp32: parts of the names of operators; on a CPU it is less.
# Source: the documentation of torch 2.13, "Autocast Op Reference".
_KEPT_ON_CPU = ("loss", "entropy", "prod", "fft", "linalg")
_KEPT = (
    *_KEPT_ON_CPU, "softmax", "norm", "exp", "log", "pow", "sum", "mean", "var", "std", "sqrt",
    "reciprocal", "cosine", "dist", "erfinv",
)  # fmt: skip
# Parts of the names of operators whose arguments autocast casts.
_CAST = ("mm", "mv", "matmul", "dot", "linear", "conv", "attention", "lstm", "gru", "rnn", "einsum")


class RandomRounding(_MODE):  # type: ignore[misc]
    """Dispatch mode that multiplies each number of a result by 1 + e, with a random e.

    Views and what is written in place stay as they are, and so do random numbers. In low precision
    arguments of products are rounded, too. A weight's number is by the same e in all steps: it
    hardly changes from one step to the next, and so is rounded to the same side.

    Args:
        rounding: The largest e.
        seed: Which errors; the script's own generators aren't drawn from.
    """

    def __init__(self, rounding: float, seed: int) -> None:
        super().__init__()
        self._rounding = rounding
        self._low = rounding >= LOW
        self._seed = seed
        self._factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._at = 0
        self._weights: dict[int, Tensor] = {}  # factors, by the address of the memory

    def use(self, module: Module) -> None:
        """Round the weights of a module where they are used."""
        if not self._low:
            return
        for weight in parameters_of(module):
            storage = weight.untyped_storage()
            address, count = storage.data_ptr(), storage.nbytes() // weight.element_size()
            known = self._weights.get(address)
            if known is None or known.numel() != count or known.dtype != weight.dtype:
                self._weights[address] = self._errors_of(count, len(self._weights), weight)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(r.alias_info is not None for r in func._schema.returns) or draws(func):
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if self._low and any(word in name for word in _kept(args)):
            return func(*args, **(kwargs or {}))
        if self._low and any(word in name for word in _CAST):
            args = tuple(map(self._rounded_argument, args))
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else (output,):
            self._round(tensor)
        return output

    def _round(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
            return
        factors = self._of(tensor.device, tensor.dtype)
        # In the order of memory, whatever the strides are; operators make dense ones.
        if not _dense(tensor):
            return
        flat = tensor.as_strided((tensor.numel(),), (1,))
        for first in range(0, len(flat), _ERRORS):
            part = flat[first : first + _ERRORS]
            part.mul_(self._some(factors, part.numel()))

    def _rounded_argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        storage = value.untyped_storage()
        factors = self._weights.get(storage.data_ptr())
        # The memory of a weight that is gone may be another tensor's by now.
        same = factors is not None and factors.untyped_storage().nbytes() == storage.nbytes()
        if factors is None or not same or factors.dtype != value.dtype:
            # What has been computed in low precision is rounded already, but twice is no harm.
            copied = value.clone() if value.is_floating_point() else value
            self._round(copied)
            return copied
        return value * factors.as_strided(value.shape, value.stride(), value.storage_offset())

    def _errors_of(self, count: int, which: int, like: Tensor) -> Tensor:
        generator = torch.Generator(like.device).manual_seed(self._seed + (which << 16))
        errors = torch.empty(count, device=like.device, dtype=like.dtype)
        return errors.uniform_(-1, 1, generator=generator).mul_(self._rounding).add_(1)

    def _some(self, factors: Tensor, count: int) -> Tensor:
        self._at = (self._at * 1_103_515_245 + 12_345) % _ERRORS  # another place each time
        at = min(self._at, 2 * _ERRORS - count)
        return factors[at : at + count]

    def _of(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        key = device, dtype
        if key not in self._factors:
            generator = torch.Generator().manual_seed(self._seed)
            errors = torch.rand(2 * _ERRORS, generator=generator, dtype=torch.float64)
            self._factors[key] = (1 + (2 * errors - 1) * self._rounding).to(device, dtype)
        return self._factors[key]


def _kept(args: Any) -> tuple[str, ...]:
    given = next((it for it in args if isinstance(it, Tensor)), None)
    return _KEPT_ON_CPU if given is None or given.device.type == "cpu" else _KEPT


def _dense(tensor: Tensor) -> bool:
    """True if a tensor's numbers fill a piece of memory without gaps or overlaps."""
    sizes = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    expected = 1
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return True


class Rounding:
    """Rounds in all calls of roots, and in all backward passes, once it is due.

    Args:
        mode: Rounds.
        due: Returns whether it is.
    """

    def __init__(self, mode: RandomRounding, due: Callable[[], bool]) -> None:
        self._mode, self._due = mode, due

    def install(self, roots: RootCalls, undo: ExitStack) -> None:
        """Be around the calls of roots, and around autograd."""
        roots.around = self._around
        undo.callback(self._leave, roots)
        for name in ("backward", "grad"):
            place = Differentiating.ROUNDED
            patching.wrap(torch.autograd, name, self._differentiating, undo, place)

    def _leave(self, roots: RootCalls) -> None:
        roots.around = None

    def _around(self, _: Root, module: Module, call: Call) -> Call:
        def rounded(*args: Any, **kwargs: Any) -> Any:
            self._mode.use(module)
            return self._rounded(call, *args, **kwargs)

        return rounded

    def _differentiating(self, original: Any) -> Any:
        @functools.wraps(original)
        def differentiate(*args: Any, **kwargs: Any) -> Any:
            return self._rounded(original, *args, **kwargs)

        return differentiate

    def _rounded(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        with self._mode if self._due() else nullcontext():
            return call(*args, **kwargs)
