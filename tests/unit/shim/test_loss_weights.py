"""Weights that are foretold while the ranks are still being asked."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttrain.shim.batches import Batches
from fasttrain.shim.loss_weights import LossWeights
from fasttrain.shim.shares import Share

_RANKS = runpy.run_path(str(Path(__file__).with_name("fake_ranks.py")))
IGNORED = -100
# Tokens of each rank that count, pass by pass.
EVEN = [(4, 4), (4, 4), (4, 4)]
CHANGING = [(4, 4), (1, 3), (2, 4), (4, 4)]
NONE_COUNTS = [(4, 4), (0, 0), (4, 4)]


def batch(counting: int, seed: int) -> tuple[Tensor, Tensor]:
    """Give 4 samples of 5 features in double precision, and classes of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (4,), generator=generator)
    y[counting:] = IGNORED
    return x, y


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def alone(counts: Sequence[int], seed: int) -> tuple[Tensor, list[Tensor]]:
    """Give loss and gradients of all ranks' samples in one process."""
    parts = [batch(count, seed + rank) for rank, count in enumerate(counts)]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    model = net()
    loss = functional.cross_entropy(model(x), y, ignore_index=IGNORED)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


NET = net()  # made once: ranks that are threads share torch's generator


def usual(scores: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(scores, y, ignore_index=IGNORED)


def masked(scores: Tensor, y: Tensor) -> Tensor:
    """Take the mean of the samples that count, whose number no node of the graph has saved."""
    each = functional.cross_entropy(scores, y, ignore_index=IGNORED, reduction="none")
    return each[y != IGNORED].mean()


def masked_or_nothing(scores: Tensor, y: Tensor) -> Tensor:
    return masked(scores, y) if (y != IGNORED).any() else (scores * 0).sum()


def pooled_where_all_count(scores: Tensor, y: Tensor) -> Tensor:
    """Take the same mean by an operation that isn't known as one, where none is left out."""
    if (y == IGNORED).any():
        return usual(scores, y)
    each = functional.cross_entropy(scores, y, reduction="none")
    return functional.avg_pool1d(each[None, None], len(each)).reshape(())


def early(
    passes: Sequence[tuple[int, int]],
    loss_of: Callable[[Tensor, Tensor], Tensor] = usual,
    late: Sequence[int] = (),
) -> list[list[tuple[Any, Any, Any, int]]]:
    """Give, per rank and pass: loss, gradients, the factor that put them right, sums so far.

    Args:
        passes: Samples of each rank that count.
        loss_of: Gives the loss of scores and classes.
        late: Ranks whose gradients can't be put right behind a pass.
    """

    def act(ranks: Any) -> Any:
        batches, told = Batches(), []
        weights = LossWeights(ranks, batches)
        for number, counts in enumerate(passes):
            batches.cut(Share(4, 8))
            x, y = batch(counts[ranks.rank], 10 * number + ranks.rank)
            model = copy.deepcopy(NET)
            loss = loss_of(model(x), y)
            weights.begin_pass()
            on_time = ranks.rank not in late
            weighed = weights.weigh_early(loss) if on_time else None
            if weighed is None:
                weighed = weights.weigh((loss,), value=True, early=on_time)[0]
            asked_before = ranks.sums
            loss.backward(torch.ones_like(loss) * weighed.factor)
            factor = weights.settle()
            gradients = [p.grad * factor for p in model.parameters() if p.grad is not None]
            told.append((weighed.value, gradients, factor, asked_before))
        return told

    results: list[Any] = _RANKS["on_ranks"](2, act)
    return results


def assert_as_one_process(of_ranks: Any, passes: Any) -> None:
    for number, counts in enumerate(passes):
        loss, gradients = alone(counts, 10 * number)
        mean = _RANKS["average"]([rank[number][1] for rank in of_ranks])
        torch.testing.assert_close(mean, gradients, rtol=1e-12, atol=1e-12)
        for rank in of_ranks:
            torch.testing.assert_close(rank[number][0], loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("passes", [EVEN, CHANGING])
def test_losses_and_gradients_are_those_of_one_process(passes: Any) -> None:
    assert_as_one_process(early(passes), passes)


@pytest.mark.parametrize(
    ("loss_of", "passes"),
    [
        pytest.param(masked, [(4, 4), (4, 1), (3, 1), (4, 4)], id="one element on one rank"),
        pytest.param(masked_or_nothing, [(4, 4), (2, 0), (4, 4)], id="nothing on one rank"),
        pytest.param(pooled_where_all_count, [(2, 3), (2, 4), (3, 3)], id="unseen on one rank"),
    ],
)
def test_ranks_whose_graphs_differ_agree_on_one_factor(loss_of: Any, passes: Any) -> None:
    of_ranks = early(passes, loss_of)
    assert_as_one_process(of_ranks, passes)
    factors = [[told[2] for told in rank] for rank in of_ranks]
    assert factors[0] == factors[1]
    assert factors[0] != [1.0] * len(passes)


def test_a_rank_that_cannot_put_its_gradients_right_goes_on_while_it_need_not() -> None:
    assert_as_one_process(early(EVEN, late=[1]), EVEN)


def test_a_rank_that_cannot_put_its_gradients_right_stops_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        early(CHANGING, late=[1])
    assert ended.value.code == 78
    assert capsys.readouterr().err.rstrip().endswith("[ranks-losses]")


def test_no_rank_waits_before_a_pass_from_the_second_on() -> None:
    """Sums that were waited for when each pass began: only the first had to."""
    assert [told[3] for told in early(EVEN)[0]] == [1, 1, 2]


def test_only_a_batch_that_counts_for_something_else_is_put_right() -> None:
    assert [told[2] for told in early(EVEN)[0]] == [1.0, 1.0, 1.0]
    # 8 tokens of 8 samples were foretold and 4 came; then 4 foretold, 6 came; 6 foretold, 8 came.
    assert [told[2] for told in early(CHANGING)[0]] == [1.0, 2.0, 4 / 6, 6 / 8]


def test_a_batch_of_which_nothing_counts_leaves_no_gradient() -> None:
    for told in early(NONE_COUNTS):
        _, gradients, factor, _ = told[1]
        assert factor == 1.0
        assert all(bool(torch.nan_to_num(g).eq(0).all()) for g in gradients)
        torch.testing.assert_close(told[2][0], alone((4, 4), 20)[0], rtol=1e-12, atol=0)
