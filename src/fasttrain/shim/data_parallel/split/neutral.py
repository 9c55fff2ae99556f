"""Runs a model without randomness, so that two calls of it can be compared.

Every operator that draws random numbers returns a constant for each element instead: a dropout
keeps everything, noise is constant. A model's results then don't depend on the number of rows,
unless the rows depend on each other.

Source: operators with ``torch.Tag.nondeterministic_seeded`` of torch 2.13.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MASKS = (torch.bool, torch.uint8)
_ORDERS = ("randperm", "multinomial")
_INTEGERS = ("randint", "randint_like", "random_")
_MODE: Any = TorchDispatchMode  # without annotations
_READING: Any = torch.ops.aten._local_scalar_dense.default
MOST_DRAWS = 100_000  # a loop that draws until it gets another number would not end


class NotNeutralError(Exception):
    """Raised if an operator draws random numbers and has no constant to replace them."""


class Neutral(_MODE):  # type: ignore[misc]
    """Dispatch mode that replaces random numbers by constants.

    Args:
        known: Tensors that Python may read, since they don't depend on the rows.
        otherwise: Use other constants, to see which results depend on them.

    Attributes:
        reads: True if Python has read a number of any other tensor, such as to branch on it.
        by_values: True if a shape depended on values: a submodule may get no row at all.
        draws: Number of operators that drew random numbers.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, otherwise: bool = False) -> None:
        super().__init__()
        self.reads = self.by_values = False
        self.draws = 0
        self._known = {id(tensor) for tensor in known}
        self._otherwise = otherwise

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if func is _READING and id(args[0]) not in self._known:
            self.reads = True
        if torch.Tag.dynamic_output_shape in func.tags and _by_values(func, args):
            self.by_values = True
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.draws += 1
        name = func._schema.name.removeprefix("aten::")
        if self.draws > MOST_DRAWS:
            raise NotNeutralError(f"{name} was called more than {MOST_DRAWS:,} times")
        if any(argument.name == "dropout_p" for argument in func._schema.arguments):
            return func(**_named(func, args, kwargs) | {"dropout_p": 0.0})
        constant = _CONSTANTS.get(name)
        if constant is None:
            raise NotNeutralError(f"{name} draws random numbers")
        named = _named(func, args, kwargs)
        given = constant(func, named)
        return _other(name, given, named) if self._otherwise else given


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _by_values(func: Any, args: tuple[Any, ...]) -> bool:
    """True if the shape of an operator's result depends on values of its arguments."""
    if func._schema.name != "aten::index":
        return True
    return any(index is not None and index.dtype in _MASKS for index in args[1])


def _other(name: str, given: Any, named: dict[str, Any]) -> Any:
    """Return different constants of the same kind."""
    if isinstance(given, tuple):
        return (_other(name, given[0], named), *given[1:])
    if name in _ORDERS:
        return given.copy_(given.flip(-1))
    if name in _INTEGERS:
        return given.fill_((named.get("high") or named.get("to") or 2) - 1)
    if not given.is_floating_point():
        return given.logical_not_()
    every_other = torch.arange(given.numel(), device=given.device).view(given.shape) % 2
    return given.mul_(0.5 + 0.25 * every_other)  # not all equal: a softmax would cancel that


def _filled(value: float) -> Callable[[Any, dict[str, Any]], Any]:
    """Return a replacement that fills a tensor with one number, as a factory or in place."""

    def fill(func: Any, given: dict[str, Any]) -> Any:
        like = given.get("self")
        if func._schema.name.endswith("_") and isinstance(like, Tensor):
            return like.fill_(value)
        options = {k: given[k] for k in ("dtype", "device") if given.get(k) is not None}
        if isinstance(like, Tensor):
            return torch.full_like(like, value, **options)
        options.setdefault("dtype", torch.get_default_dtype())
        return torch.full(given["size"], value, **options)

    return fill


def _between(func: Any, given: dict[str, Any]) -> Any:
    middle = (given.get("from", 0.0) + given.get("to", 1.0)) / 2
    return _filled(middle)(func, given)


def _normal(func: Any, given: dict[str, Any]) -> Any:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        return mean + 0.5 * std
    if isinstance(given.get("self"), Tensor) and not func._schema.name.endswith("_"):
        raise NotNeutralError("normal draws random numbers")
    return _filled(mean + 0.5 * std)(func, given)


def _integers(func: Any, given: dict[str, Any]) -> Any:
    low = given.get("low", given.get("from") or 0)
    if isinstance(given.get("self"), Tensor):
        return _filled(low)(func, given)
    return _filled(low)(func, {"dtype": torch.int64, **given})


def _permutation(_: Any, given: dict[str, Any]) -> Any:
    # Reversed, not the identity: a permutation of rows must show in the results.
    return torch.arange(given["n"] - 1, -1, -1, device=given.get("device"))


def _keeping(_: Any, given: dict[str, Any]) -> Any:
    whole = given["input"]
    return whole.clone(), torch.ones_like(whole, dtype=torch.bool)


def _likelier(_: Any, given: dict[str, Any]) -> Any:
    chance = given["self"]
    return (chance > 0.5).to(chance.dtype)


def _likeliest(_: Any, given: dict[str, Any]) -> Any:
    return given["self"].topk(given["num_samples"], dim=-1).indices


def _in_cudnn(func: Any, given: dict[str, Any]) -> Any:
    return func(**given | {"dropout": 0.0})


_CONSTANTS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "bernoulli": _likelier,
    "bernoulli_": _filled(1.0),
    "exponential_": _filled(1.0),
    "multinomial": _likeliest,
    "native_dropout": _keeping,
    "normal": _normal,
    "normal_": _normal,
    "rand": _filled(0.5),
    "rand_like": _filled(0.5),
    "randint": _integers,
    "randint_like": _integers,
    "randn": _filled(0.5),
    "randn_like": _filled(0.5),
    "random_": _integers,
    "randperm": _permutation,
    "uniform_": _between,
    "_cudnn_rnn": _in_cudnn,
}


_ENDING = (signal.SIGINT, signal.SIGTERM)  # not held: they end the run


@contextmanager
def held_signals() -> Iterator[None]:
    """Delay signal handlers until after the block, since a handler's exception isn't the block's.

    torch raises from a handler if a DataLoader worker has died, and so do timeouts. A trial of a
    call would take such an exception for the call's own, on one rank only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers only run in the main thread
        return
    came: list[int] = []
    handlers: dict[int, Callable[..., Any]] = {}
    try:
        for signum in signal.valid_signals() - set(_ENDING):
            handler = signal.getsignal(signum)
            if callable(handler):
                handlers[signum] = handler
                signal.signal(signum, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            handlers[number](number, sys._getframe())
