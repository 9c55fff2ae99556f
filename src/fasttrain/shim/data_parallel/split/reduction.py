"""A sum over all ranks as a custom torch operator, which a compiler treats as opaque.

It sums what a split call computes from the rank's rows alone: statistics of BatchNorm, losses. The
gradient w.r.t. each rank's part is the sum of all ranks' gradients, hence the same operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
