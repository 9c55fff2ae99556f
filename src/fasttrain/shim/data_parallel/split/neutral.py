"""Runs a model without randomness, so that two calls of it can be compared.

Every operator that draws random numbers returns a constant for each element instead: a dropout
keeps everything, noise is constant. A model's results then don't depend on the number of rows,
unless the rows depend on each other. Indices that are out of range are an error on a device, too.

Source: operators with ``torch.Tag.nondeterministic_seeded`` of torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.data_parallel.split.index_ranges import check_indices, named_arguments
from fasttrain.shim.data_parallel.split.number_reads import READING, why_read

Draw = tuple[str, tuple[int, ...]]  # an operator that draws, and the shape of what it draws
_MASKS = (torch.bool, torch.uint8)
_ORDERS = ("randperm", "multinomial")
_INTEGERS = ("randint", "randint_like", "random_")
_MODE: Any = TorchDispatchMode  # without annotations
MOST_DRAWS = 100_000  # a loop that draws until it gets another number would not end


class NotNeutralError(Exception):
    """Raised if an operator draws random numbers and has no constant to replace them."""


class Neutral(_MODE):  # type: ignore[misc]
    """Dispatch mode that replaces random numbers by constants.

    Args:
        known: Tensors that Python may read, since they don't depend on the rows.
        otherwise: Use other constants, to see which results depend on them.
        place: Use constants from this place of the range of a draw, from 0 to 1, in every other
            element along a dimension, so that a branch is taken which is unlikely.
        along: The dimension for each draw; None for all elements.

    Attributes:
        reads: Why a number of any other tensor that was read rules out a split; empty if none does.
        by_values: True if a shape depended on values: a submodule may get no row at all.
        drawn: The operators that drew random numbers, each with the shape of these.
    """

    def __init__(
        self,
        known: Iterable[Tensor] = (),
        *,
        otherwise: bool = False,
        place: float | None = None,
        along: Sequence[int | None] = (),
    ) -> None:
        super().__init__()
        self.reads, self.by_values = "", False
        self.drawn: list[Draw] = []
        self._known = {id(tensor) for tensor in known}
        self._otherwise = otherwise
        self._place, self._along = place, along

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if func in READING and not self._knows(args):
            self.reads = self.reads or why_read(args[0])
        if torch.Tag.dynamic_output_shape in func.tags and _by_values(func, args):
            self.by_values = True
        if torch.Tag.nondeterministic_seeded not in func.tags:
            check_indices(func, args, kwargs)
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        with_p = any(argument.name == "dropout_p" for argument in func._schema.arguments)
        if not with_p and name not in _CONSTANTS:
            # In inference mode operators come here that are elsewhere seen as those they consist
            # of: a dropout in evaluation consists of none.
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return self._drawn_by(func, name, named_arguments(func, args, kwargs), with_p=with_p)

    def _knows(self, args: tuple[Any, ...]) -> bool:
        return all(id(arg) in self._known for arg in args if isinstance(arg, Tensor))

    def _drawn_by(self, func: Any, name: str, named: dict[str, Any], *, with_p: bool) -> Any:
        """Return constants instead of what an operator draws."""
        number = len(self.drawn)
        self.drawn.append((name, ()))
        if number == MOST_DRAWS:
            raise NotNeutralError(f"{name} was called more than {MOST_DRAWS:,} times")
        if with_p:
            return func(**named | {"dropout_p": 0.0})
        constant = _CONSTANTS.get(name)
        if constant is None:
            raise NotNeutralError(f"{name} draws random numbers")
        given = constant(func, named)
        if isinstance(given, Tensor):
            self.drawn[number] = name, tuple(given.shape)
        if self._place is not None and name in _PLACES:
            dim = self._along[number] if number < len(self._along) else None
            _put_at(given, _PLACES[name](given, named, self._place), dim)
        return _other(name, given, named) if self._otherwise else given


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


def along_which(whole: Sequence[Draw], part: Sequence[Draw]) -> list[int | None]:
    """Return for each draw of a call the last dimension that isn't of rows; None without any.

    Args:
        whole: What the whole call has drawn.
        part: What the call with a part of the batch has drawn.
    """
    return [_along_which(*pair) for pair in zip(whole, part, strict=False)]


def _along_which(whole: Draw, part: Draw) -> int | None:
    (name, sizes), (other, own) = whole, part
    if name != other or len(sizes) != len(own):
        return None
    same = [dim for dim, size in enumerate(sizes) if size == own[dim] and size > 1]
    return same[-1] if same else None


def has_place(drawn: Iterable[Draw], place: float) -> bool:
    """True if a place in the range makes a difference for a draw."""
    names = {name for name, _ in drawn} & _PLACES.keys()
    return bool(names if place > 0.5 else names - _LOW)


def _put_at(given: Tensor, there: Any, dim: int | None) -> None:
    """Replace a draw's constants; with a dimension, those of every other element along it."""
    there = torch.as_tensor(there, device=given.device).expand(given.shape)
    if dim is not None:
        odd = torch.arange(given.size(dim), device=given.device) % 2 == 1
        there = torch.where(odd.view(-1, *(1,) * (given.dim() - dim - 1)), given, there)
    given.copy_(there)


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


def _at_place(_: Tensor, named: dict[str, Any], place: float) -> Any:
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    return low + (high - low) * place


def _chosen(_: Tensor, named: dict[str, Any], place: float) -> Any:
    chance = named.get("p", named["self"])
    return chance > place


def _kept(_: Tensor, named: dict[str, Any], place: float) -> Any:
    chance: Any = named.get("p", 0.5)
    return chance > place


def _deviating(given: Tensor, named: dict[str, Any], place: float) -> Any:
    return given + (-2.0 if place < 0.5 else 1.0) * named.get("std", 1.0)


def _waited(_: Tensor, __: dict[str, Any], place: float) -> Any:
    return -math.log1p(-place)


def _integer(given: Tensor, named: dict[str, Any], place: float) -> Any:
    high = named.get("high") or named.get("to")
    return given if place < 0.5 or high is None else high - 1


# Those whose usual constants are those of a low place.
_LOW = {"bernoulli_", "randint", "randint_like", "random_"}
# Other constants for a place in the range, of those draws on which a branch may depend.
_PLACES: dict[str, Callable[[Tensor, dict[str, Any], float], Any]] = {
    "bernoulli": _chosen,
    "bernoulli_": _kept,
    "exponential_": _waited,
    "normal": _deviating,
    "normal_": _deviating,
    "rand": _at_place,
    "rand_like": _at_place,
    "randint": _integer,
    "randint_like": _integer,
    "randn": _deviating,
    "randn_like": _deviating,
    "random_": _integer,
    "uniform_": _at_place,
}
