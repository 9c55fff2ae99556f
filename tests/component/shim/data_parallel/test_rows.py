"""Rows of a batch on several ranks: what they give together, and what flows back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.split.rows import Rows, mean_gradient, share
from fasttrain.shim.data_parallel.split.ways import Split
from support import fake_ranks

SIZES = [(8, 2), (9, 2), (7, 3), (3, 3)]
AGAIN = True  # differentiate twice


def whole(size: int, dim: int) -> Tensor:
    torch.manual_seed(size)
    return torch.randn(size, 4, 3, dtype=torch.float64).movedim(0, dim).contiguous()


def on_ranks(count: int, act: Callable[[Any], Any]) -> list[Any]:
    found: list[Any] = fake_ranks.on_ranks(count, act)
    return found


@pytest.mark.parametrize(("size", "ranks"), SIZES)
@pytest.mark.parametrize("dim", [0, 1])
def test_the_rows_of_all_ranks_are_the_batch(size: int, ranks: int, dim: int) -> None:
    x = whole(size, dim)

    def act(rank: Any) -> tuple[int, Tensor]:
        rows = Rows(rank, size)
        part = rows.take(x, dim)
        assert part.size(dim) == rows.own
        return part.size(dim), rows.give(part, dim)

    sizes, given = zip(*on_ranks(ranks, act), strict=True)
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == size
    for one in given:
        assert torch.equal(one, x)
        assert one.is_contiguous()


ORDERS = [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)]


def laid_out(sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return a tensor whose dimensions lie in memory in an order, the outermost first."""
    made = torch.arange(float(math.prod(sizes))).reshape([sizes[dim] for dim in order])
    return made.permute([order.index(dim) for dim in range(len(order))])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sliced", [False, True])
def test_the_rows_of_all_ranks_lie_in_memory_as_those_of_one(
    order: tuple[int, ...], dim: int, sliced: bool
) -> None:
    sizes = [2, 3, 2]
    sizes[dim] = 4
    x = laid_out(tuple(sizes), order)[..., : 1 + (not sliced)]

    def act(rank: Any) -> tuple[Tensor, Tensor]:
        rows = Rows(rank, 4)
        part = rows.cut(x, dim)
        given = rows.give(part.clone().requires_grad_(), dim)
        given.add_(1)  # it is no view, whose change in place autograd would refuse
        return rows.give(part, dim), given.detach()

    for whole, trained in on_ranks(2, act):
        assert torch.equal(whole, x)
        assert torch.equal(trained, x + 1)
        for one in (whole, trained):
            assert one.permute(order).is_contiguous()
            one.permute(order).view(-1)


def test_single_rows_lie_in_memory_as_the_whole_call_has_shown() -> None:
    module, x = nn.Identity(), laid_out((2, 4, 3), (1, 0, 2))
    split = Split((0,), (0,), orders=((1, 0, 2),))

    def act(rank: Any) -> Tensor:
        rows = Rows(rank, 2)
        part = rows.cut(x, 0).contiguous()  # as of most operators, which see no other order
        whole: Tensor = split.put_together(module, part, rows, rows.gather, [x])
        return whole

    for found in on_ranks(2, act):
        assert torch.equal(found, x)
        assert found.stride() == x.stride()


def test_a_known_order_counts_whatever_that_of_the_part() -> None:
    x = torch.arange(12.0).view(6, 2)

    def act(rank: Any) -> Tensor:
        return Rows(rank, 2).gather(x[3 * rank.rank : 3 * rank.rank + 3], 0, (1, 0))

    for found in on_ranks(2, act):
        assert torch.equal(found, x)
        assert found.stride() == (1, 6)


def test_images_of_one_channel_stay_channels_last() -> None:
    """By which a convolution decides its own order, though they are contiguous either way."""
    x = torch.arange(36.0).view(4, 1, 3, 3).to(memory_format=torch.channels_last)
    assert x.is_contiguous()

    def act(rank: Any) -> Tensor:
        return Rows(rank, 4).give(x[2 * rank.rank : 2 * rank.rank + 2], 0)

    for found in on_ranks(2, act):
        assert torch.equal(found, x)
        assert found.stride() == x.stride()


def test_blocks_of_rows_stay_together() -> None:
    x = torch.arange(15)  # 5 rows of 3 each

    def act(rank: Any) -> tuple[list[int], Tensor]:
        rows = Rows(rank, 5)
        part = rows.take(x, 0)
        return part.tolist(), rows.give(part, 0)

    (first, one), (second, other) = on_ranks(2, act)
    assert (first, second) == (list(range(9)), list(range(9, 15)))
    assert torch.equal(one, x)
    assert torch.equal(other, x)


def model(x: Tensor, w: Tensor) -> Tensor:
    return (x.flatten(1) @ w).tanh()


@pytest.mark.parametrize(("size", "ranks"), SIZES)
def test_gradients_are_those_of_one_process(size: int, ranks: int) -> None:
    """Averaged over the ranks for parameters, whole for inputs, and so once more."""
    x, start = whole(size, 0), torch.linspace(-1, 1, 36, dtype=torch.float64).view(12, 3)

    def derivatives(call: Callable[[Tensor, Tensor], Tensor], mean: Any) -> list[Tensor]:
        inputs, w = x.clone().requires_grad_(), start.clone().requires_grad_()
        out = call(inputs, w)
        # In which no row counts by itself, and a penalty on the parameters.
        loss = out.norm() * out.std(0).sum() + w.pow(2).sum()
        of_x, of_w = torch.autograd.grad(loss, (inputs, w), create_graph=AGAIN)
        of_w = mean(of_w)
        penalty = of_x.pow(2).sum() + of_w.norm() * out.mean()
        again_x, again_w = torch.autograd.grad(penalty, (inputs, w))
        return [loss.detach(), of_x.detach(), of_w.detach(), again_x, mean(again_w)]

    def act(rank: Any) -> list[Tensor]:
        rows = Rows(rank, size)
        return derivatives(
            lambda inputs, w: rows.give(model(rows.take(inputs, 0), w), 0),
            lambda gradient: mean_gradient(gradient, rank),
        )

    expected = derivatives(model, lambda gradient: gradient)
    for found in on_ranks(ranks, act):
        torch.testing.assert_close(found, expected)


def test_what_each_rank_uses_whole_gets_the_gradient_of_all() -> None:
    x, start = whole(5, 0), torch.linspace(-1, 1, 36, dtype=torch.float64).view(12, 3)

    def derivative(call: Callable[[Tensor], Tensor]) -> Tensor:
        w = start.clone().requires_grad_()
        hidden = w * w  # computed outside of the call, alike on all ranks
        call(hidden).pow(2).sum().backward()
        assert w.grad is not None
        return w.grad

    def act(rank: Any) -> Tensor:
        rows = Rows(rank, 5)
        return derivative(lambda w: rows.give(model(rows.take(x, 0), share(w, rank)), 0))

    expected = derivative(lambda w: model(x, w))
    for found in on_ranks(2, act):
        torch.testing.assert_close(found, expected)


def test_what_needs_no_gradient_gets_no_graph() -> None:
    x = whole(6, 0)

    def act(rank: Any) -> bool:
        rows = Rows(rank, 6)
        with torch.no_grad():
            some = rows.give(rows.take(x.clone().requires_grad_(), 0), 0)
        return some.requires_grad or rows.take(x, 0).requires_grad

    assert on_ranks(2, act) == [False, False]
