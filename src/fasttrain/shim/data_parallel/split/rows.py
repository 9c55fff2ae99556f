"""Converts tensors between the script, which has whole batches, and a split call, which has rows.

Outside a split call a tensor and its gradient are equal on all ranks. Inside, each rank has its own
rows, and gradients are N times those of one process, where N is the number of ranks: gradients of
parameters are averaged over the ranks, so that the rows' contributions add up, and what all ranks
compute alike keeps its value. Every function here converts from one side to the other, and its
derivative converts back. Each derivative consists of the same functions, so that it can be
differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

Order = list[int] | tuple[int, ...]  # of dimensions, from the outermost in memory to the innermost
Gather = Callable[[Tensor, int, Order | None], Tensor]


class Collectives(Protocol):
    """The ranks' operations on tensors."""

    rank: int
    world_size: int

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated in the first dimension."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""


@dataclass(frozen=True)
class Rows:
    """How the rows of one batch are distributed; the first ranks get one of the remainder each.

    Attributes:
        ranks: All ranks.
        count: Number of rows in the whole batch.
    """

    ranks: Collectives
    count: int

    def of(self, rank: int) -> int:
        """Return a rank's number of rows."""
        each, over = divmod(self.count, self.ranks.world_size)
        return each + (rank < over)

    @functools.cached_property
    def own(self) -> int:
        """This rank's number of rows."""
        return self.of(self.ranks.rank)

    @functools.cached_property
    def first(self) -> int:
        """This rank's first row."""
        each, over = divmod(self.count, self.ranks.world_size)
        return self.ranks.rank * each + min(self.ranks.rank, over)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of a tensor.

        Args:
            whole: Equal on all ranks; its size along ``dim`` is a multiple of `count`.
            dim: The dimension of the batch.
        """
        if whole.requires_grad and torch.is_grad_enabled():
            part: Tensor = _applied(_Take, whole, dim, self)
            return part
        return self.cut(whole, dim)

    def give(
        self, part: Tensor, dim: int, gather: Gather | None = None, order: Order | None = None
    ) -> Tensor:
        """Return the rows of all ranks.

        Args:
            part: This rank's rows; the size along ``dim`` is a multiple of `own`.
            dim: The dimension of the batch.
            gather: Gathers ``part`` along ``dim`` without a graph; default: `gather`.
            order: The memory order of the whole, if it is known.
        """
        gather = gather or self.gather
        if part.requires_grad and torch.is_grad_enabled():
            whole: Tensor = _applied(_Give, part, dim, self, gather, order)
            return whole
        return gather(part, dim, order)

    def share(self, whole: Tensor) -> Tensor:
        """Return a tensor that a split call uses as a whole on each rank."""
        return share(whole, self.ranks)

    def cut(self, whole: Tensor, dim: int, scale: int = 1) -> Tensor:
        """Return this rank's rows times a scale, without a graph."""
        if type(whole) is not Tensor and (lazy := getattr(whole, "own_rows", None)) is not None:
            # LazyRows, not gathered yet
            own: Tensor | None = lazy(self, dim, scale)
            return self.cut(cast("Any", whole).whole(), dim, scale) if own is None else own
        block = whole.size(dim) // self.count
        part = whole.narrow(dim, block * self.first, block * self.own)
        part = part.contiguous() if whole.is_contiguous() else part
        return part if scale == 1 else part * scale

    def gather(self, part: Tensor, dim: int, order: Order | None = None) -> Tensor:
        """Return the rows of all ranks, without a graph.

        Args:
            part: This rank's rows.
            dim: The dimension of the batch.
            order: The memory order of the result, if it is known; else that of the part.
        """
        even = not self.count % self.ranks.world_size
        if even and dim == 0 and order is None and _is_in_order(part):
            return self.ranks.all_gather(part.detach())
        order = order or memory_order(part)
        moved = part.detach().movedim(dim, 0).contiguous()
        block = moved.size(0) // self.own
        most = block * self.of(0)
        if moved.size(0) < most:
            moved = torch.cat([moved, moved.new_zeros(most - moved.size(0), *moved.shape[1:])])
        gathered = self.ranks.all_gather(moved)
        if not even:
            parts = torch.split(gathered, most)
            gathered = torch.cat([p[: block * self.of(rank)] for rank, p in enumerate(parts)])
        whole = gathered.movedim(0, dim)
        strides = dense_strides(whole.shape, order)
        if dim == 0 and gathered.stride() == strides:
            return gathered
        # A copy and no view: a view that a `Function` returns can't be changed in place.
        return gathered.new_empty_strided(whole.shape, strides).copy_(whole)


def _is_in_order(tensor: Tensor) -> bool:
    """True if a tensor's dimensions lie in memory in their order, without a doubt."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return plain and tensor.is_contiguous() and 1 not in tensor.shape


def memory_order(tensor: Tensor) -> list[int]:
    """Return a tensor's dimensions from the outermost in memory to the innermost.

    The place of one of size 1 can't always be told: operators give it any stride.
    """
    dims = list(range(tensor.dim()))
    if tensor.layout is not torch.strided:
        return dims
    strides, sizes = tensor.stride(), tensor.shape
    # A dimension of size 1 has the stride of the one around it: so it lies inside of that one.
    return sorted(dims, key=lambda dim: (-strides[dim], sizes[dim] == 1))


def dense_strides(sizes: Sequence[int], order: Order) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps."""
    strides, step = [1] * len(sizes), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, sizes[dim])
    return tuple(strides)


def share(whole: Tensor, ranks: Collectives) -> Tensor:
    """Return a tensor that a split call uses as a whole on each rank."""
    if whole.requires_grad and torch.is_grad_enabled():
        shared: Tensor = _applied(_Share, whole, ranks)
        return shared
    return whole


def mean_gradient(gradient: Tensor, ranks: Collectives) -> Tensor:
    """Return the mean of a parameter's gradient over the ranks, differentiably."""
    mean: Tensor = _applied(_Mean, gradient, ranks)
    return mean


def _applied(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, whole: Tensor, dim: int, rows: Rows) -> Tensor:
        ctx.how = dim, rows  # type: ignore[attr-defined]
        if type(whole) is not Tensor:
            return rows.cut(whole, dim).clone()
        part = rows.cut(whole, dim)
        # Never a view: the script may change its tensor in place while the graph lives.
        return part.clone() if part.data_ptr() == whole.data_ptr() else part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dim, rows = ctx.how
        return rows.give(gradient, dim) / rows.ranks.world_size, None, None


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, part: Tensor, dim: int, rows: Rows, gather: Gather, order: Order | None
    ) -> Tensor:
        ctx.how = dim, rows  # type: ignore[attr-defined]
        return gather(part, dim, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dim, rows = ctx.how
        scale = rows.ranks.world_size
        if torch.is_grad_enabled():
            return rows.take(gradient, dim) * scale, None, None, None, None
        return rows.cut(gradient, dim, scale), None, None, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, whole: Tensor, ranks: Collectives) -> Tensor:
        ctx.ranks = ranks  # type: ignore[attr-defined]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return mean_gradient(gradient, ctx.ranks), None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, ranks: Collectives) -> Tensor:
        ctx.ranks = ranks  # type: ignore[attr-defined]
        return ranks.sum(part.detach() / ranks.world_size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return share(gradient, ctx.ranks), None


CROSSINGS = frozenset(f"{f.__name__}Backward" for f in (_Take, _Share))  # nodes of entering tensors


# A sum over all ranks as a custom torch operator, which a compiler treats as opaque.
#
# It sums what a split call computes from the rank's rows alone: statistics of BatchNorm, losses.
# The gradient w.r.t. each rank's part is the sum of all ranks' gradients, hence the same
# operator.


Reduce = Callable[[Tensor, bool], Tensor]
_SCHEMA = "(Tensor part, bool of_loss) -> Tensor"
_reduce: Reduce | None = None


@contextmanager
def reduced_by(reduce: Reduce) -> Iterator[None]:
    """Have `total` call a function in the block.

    Args:
        reduce: Returns the sum of a tensor over all ranks as a new tensor; its second argument is
            True for a loss.
    """
    global _reduce  # noqa: PLW0603 - operators are global
    before, _reduce = _reduce, reduce
    try:
        yield
    finally:
        _reduce = before


def total(part: Tensor, *, of_loss: bool = False) -> Tensor:
    """Return the sum over the ranks of what each has computed from its rows.

    Args:
        part: This rank's summand.
        of_loss: True for a loss, which other ranks may compute more or less often.
    """
    result: Tensor = _total(part, of_loss)
    return result


def _over_ranks(part: Tensor, of_loss: bool) -> Tensor:
    assert _reduce is not None
    return _reduce(part.detach(), of_loss)


def _like(part: Tensor, of_loss: bool) -> Tensor:  # noqa: ARG001 - the operator's
    return torch.empty_like(part)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's
    return None


def _back(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG001 - torch's
    return _total(gradient, of_loss=False), None


_library: Any = torch.library
_total: Any = _library.custom_op("fasttrain::total", _over_ranks, mutates_args=(), schema=_SCHEMA)
_total.register_fake(_like)
_total.register_autograd(_back, setup_context=_keep)
