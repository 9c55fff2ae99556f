"""The verdicts of `fasttrain tune` hold with the probability that is promised, at every look."""

from __future__ import annotations

import math
from itertools import accumulate, product

import pytest

from fasttrain.model.tuning import UNBOUNDED, Ratio
from fasttrain.statistics import paired as statistics
from fasttrain.statistics.paired import (
    MIN_BLOCK_S,
    MIN_TIMED_STEPS,
    MOST_WARM_UP_STEPS,
    SAME,
    PairedClocks,
    PairedRatios,
    StepTime,
    block_steps,
    block_time,
    excluded,
    log_gain,
    settled,
)


def of(ratios, alpha=0.02) -> PairedRatios:
    pairs = PairedRatios(alpha)
    for ratio in ratios:
        pairs.add(1.0, ratio)
    return pairs


def decides(heads: int, tosses: int, rank: int) -> bool:
    return min(heads, tosses - heads) < rank


def test_the_gain_is_a_martingale_of_mean_1():
    assert log_gain(0, 0) == pytest.approx(0.0)
    for tosses in range(60):
        for heads in range(tosses + 1):
            after = [math.exp(log_gain(heads + one, tosses + 1)) for one in (0, 1)]
            assert sum(after) / 2 == pytest.approx(math.exp(log_gain(heads, tosses)))


def test_the_gain_is_larger_the_more_the_counts_differ_and_the_same_on_both_sides():
    gains = [log_gain(heads, 41) for heads in range(42)]
    assert gains == pytest.approx(gains[::-1])
    assert gains[:21] == sorted(gains[:21], reverse=True)
    assert gains[20] < 0.0 < gains[0]


@pytest.mark.parametrize(("alpha", "tosses"), [(0.05, 16), (0.2, 13), (0.5, 10)])
def test_of_all_sequences_of_a_fair_coin_at_most_alpha_ever_exclude_the_truth(alpha, tosses):
    ranks = [excluded(n, alpha) for n in range(tosses + 1)]
    wrong_from_heads = sum(
        any(decides(heads, n, ranks[n]) for n, heads in enumerate(accumulate((1, *coins)), start=1))
        for coins in product((0, 1), repeat=tosses - 1)
    )
    wrong = 2 * wrong_from_heads  # heads and tails are alike
    assert 0 < wrong <= alpha * 2**tosses


@pytest.mark.parametrize("alpha", [0.005, 0.02, 0.05, 0.5])
def test_looking_300_times_is_wrong_with_at_most_alpha(alpha):
    undecided, wrong = {0: 1.0}, 0.0  # probability of each number of heads
    for n in range(1, 301):
        then: dict[int, float] = {}
        for heads, probability in undecided.items():
            for one in (0, 1):
                then[heads + one] = then.get(heads + one, 0.0) + probability / 2
        rank = excluded(n, alpha)
        undecided = {heads: p for heads, p in then.items() if not decides(heads, n, rank)}
        wrong += sum(p for heads, p in then.items() if decides(heads, n, rank))
    assert alpha / 8 < wrong <= alpha
    assert sum(undecided.values()) + wrong == pytest.approx(1.0)


def test_all_orders_of_noisy_pairs_are_judged_by_the_counts():
    alpha, noise = 0.3, (1.02, 1.5, 1.001, 9.0, 1.1, 1.3, 1.04)
    wrong = 0
    for coins in product((1, -1), repeat=len(noise)):
        pairs, verdicts = PairedRatios(alpha), []
        for n, (coin, one) in enumerate(zip(coins, noise, strict=True), start=1):
            pairs.add(1.0, one**coin)
            heads = coins[:n].count(1)
            verdict = "slower" if heads * 2 > n else "faster"
            decided = decides(heads, n, excluded(n, alpha))
            assert pairs.verdict() == (verdict if decided else "undecided")
            verdicts.append(pairs.verdict())
        wrong += set(verdicts) != {"undecided"}
    assert 0 < wrong <= alpha * 2 ** len(noise)


@pytest.mark.parametrize("alpha", [0.02, 0.2])
def test_a_uniform_prior_is_one_that_is_easy_to_check_by_hand(alpha, monkeypatch):
    monkeypatch.setattr(statistics, "PRIOR", 1.0)
    for n in range(60):
        gains = [2.0**n / ((n + 1) * math.comb(n, heads)) for heads in range(n // 2 + 1)]
        assert excluded(n, alpha) == sum(gain >= 1 / alpha for gain in gains)


def test_nothing_is_excluded_by_few_pairs():
    pairs = PairedRatios(0.02)
    assert pairs.ratio() == Ratio(0.0, 1.0, UNBOUNDED)
    assert pairs.verdict() == "undecided"
    # All of n on one side gain 2^n * 60 / ((n + 3) (n + 4) (n + 5)): 37 for 11, 60 for 12.
    for n in range(12):
        assert excluded(n, 0.02) == 0
        assert of([0.5] * n).verdict() == "undecided"
    assert of([0.5] * 11).ratio() == Ratio(0.0, 0.5, UNBOUNDED)
    assert excluded(12, 0.02) == 1
    assert of([0.5] * 12).verdict() == "faster"


def test_the_ends_are_order_statistics():
    # n pairs of which one disagrees gain 2^n * 180 / ((n + 2) (n + 3) (n + 4) (n + 5)): 32 for 14,
    # 51 for 15.
    assert [excluded(n, 0.02) for n in (12, 14, 15)] == [1, 1, 2]
    assert of([n / 10 for n in (5, 1, 9, 3, 7, 2, 8, 4, 6, 10, 12, 11)]).ratio() == Ratio(
        0.1, pytest.approx(0.65), 1.2
    )
    assert of(range(1, 15)).ratio() == Ratio(1.0, 7.5, 14.0)
    assert of(range(1, 16)).ratio() == Ratio(2.0, 8.0, 14.0)


def test_the_order_in_which_ratios_came_does_not_matter():
    ratios = [1.0 + n * n % 17 / 100 for n in range(40)]
    assert of(ratios).ratio() == of(ratios[::-1]).ratio() == of(sorted(ratios)).ratio()


@pytest.mark.parametrize("alpha", [0.02, 0.2])
def test_more_pairs_and_a_larger_alpha_exclude_more(alpha):
    ranks = [excluded(n, alpha) for n in range(400)]
    assert ranks == sorted(ranks)
    assert all(2 * rank <= n for n, rank in enumerate(ranks))
    assert all(excluded(n, 2 * alpha) >= rank for n, rank in enumerate(ranks))
    assert ranks[399] > 399 / 2 - 2.5 * math.sqrt(399)


def test_ratios_are_with_the_change_over_without():
    pairs = PairedRatios(0.02)
    for _ in range(20):
        pairs.add(plain_s=0.010, changed_s=0.008)
    assert len(pairs) == 20
    assert pairs.ratio().middle == pytest.approx(0.8)
    assert pairs.verdict() == "faster"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.95] * 20, "faster"),
        ([1.05] * 20, "slower"),
        ([1.0] * 20, "same"),
        ([1.0 + SAME, 1.0 - SAME] * 10, "same"),
        # Certain that it is no more than SAME, and which way: the way is what counts.
        ([0.999] * 20, "faster"),
        ([1.001] * 20, "slower"),
        ([0.9, 1.1] * 10, "undecided"),
        ([0.985, 1.0] * 10, "undecided"),
        # One pair in eight is nonsense, as when a block fell into a burst of other load.
        ([0.95] * 35 + [20.0] * 5, "faster"),
        ([1.05] * 35 + [0.01] * 5, "slower"),
    ],
)
def test_verdicts(ratios, verdict):
    assert of(ratios).verdict() == verdict


def test_a_ratio_of_1_speaks_for_neither_side():
    assert of([0.9] * 12).verdict() == "faster"
    assert of([0.9] * 12 + [1.0]).verdict() == "undecided"
    assert of([1.1] * 12 + [1.0]).verdict() == "undecided"


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_what_is_no_time_is_refused(bad):
    pairs = of([0.9] * 3)
    for seconds in ((bad, 1.0), (1.0, bad), (bad, bad)):
        with pytest.raises(ValueError, match="not a time in seconds"):
            pairs.add(*seconds)
    assert len(pairs) == 3


@pytest.mark.parametrize("seconds", [(1e-200, 1e200), (1e200, 1e-200)])
def test_a_ratio_that_no_float_holds_is_refused(seconds):
    with pytest.raises(ValueError, match="not a ratio"):
        PairedRatios(0.02).add(*seconds)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 5.0, math.nan])
def test_an_alpha_that_is_no_probability_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        PairedRatios(alpha)


def by_clocks(walls, processors) -> PairedClocks:
    pairs = PairedClocks(0.04)
    for wall, processor in zip(walls, processors, strict=True):
        pairs.add(StepTime(1.0, 1.0), StepTime(wall, processor))
    return pairs


NOISY = [0.5, 2.0] * 9
FASTER = [*NOISY, 0.9]  # the median, and nothing certain


@pytest.mark.parametrize(
    ("walls", "processors", "verdict"),
    [
        ([0.9] * 19, [*NOISY, 1.0], "faster"),
        ([0.9] * 19, [1.1] * 19, "faster"),
        ([0.95] * 19, [0.9] * 19, "faster"),
        ([1.0] * 19, [0.9] * 19, "same"),
        ([0.999, 1.001] * 9 + [0.999], [0.9] * 19, "same"),
        (FASTER, [0.9] * 19, "faster"),
        (FASTER, [1.1] * 19, "undecided"),
        (FASTER, [1.0] * 19, "undecided"),
        ([*NOISY, 1.1], [1.1] * 19, "slower"),
        ([*NOISY, 1.1], [0.9] * 19, "undecided"),
        ([*NOISY, 1.0], [0.9] * 19, "undecided"),
        (FASTER, FASTER, "undecided"),
    ],
)
def test_wall_time_decides_if_it_can_and_is_not_contradicted(walls, processors, verdict):
    pairs = by_clocks(walls, processors)
    assert pairs.verdict() == verdict
    assert len(pairs) == 19


def test_the_ratio_is_what_a_user_waits_for_whichever_clock_decides():
    pairs = by_clocks(FASTER, [0.4] * 19)
    assert pairs.verdict() == "faster"
    assert pairs.ratio() == Ratio(0.5, 0.9, 2.0)
    assert pairs.ratio().leaves_open("faster")
    assert not by_clocks([0.9] * 19, [0.4] * 19).ratio().leaves_open("faster")
    assert not pairs.ratio().leaves_open("undecided")


def test_two_clocks_share_alpha():
    for n in range(20):
        ratios = [0.9] * n
        alone = of(ratios, alpha=0.02).verdict()
        assert by_clocks(ratios, ratios).verdict() == alone


def test_the_time_of_a_block_is_the_usual_one_by_each_clock():
    usual, slow = StepTime(2.0, 1.0), StepTime(9.0, 3.0)
    assert block_time([usual]) == usual
    assert block_time([slow, usual]) == block_time([usual, slow, usual]) == usual
    assert block_time([StepTime(1.0, 3.0), StepTime(2.0, 2.0), StepTime(3.0, 1.0)]) == StepTime(
        2.0, 2.0
    )


def test_blocks_last_long_enough_and_have_enough_steps():
    assert block_steps([10.0]) == MIN_TIMED_STEPS
    assert block_steps([]) == block_steps([0.0]) == MIN_TIMED_STEPS
    for step_s in (1e-5, 3.3e-4, MIN_BLOCK_S / 7, MIN_BLOCK_S, 0.5):
        steps = block_steps([step_s])
        assert steps * step_s >= MIN_BLOCK_S
        assert steps == MIN_TIMED_STEPS or (steps - 1) * step_s < MIN_BLOCK_S


def test_the_length_of_blocks_is_that_of_the_usual_step():
    assert block_steps([1e-4] * 9 + [60.0] * 2) == block_steps([1e-4])


def settles(step_s) -> int | None:
    """Return the number of steps after which they have settled."""
    return next((n for n in range(len(step_s) + 1) if settled(step_s[:n])), None)


def test_steps_that_take_as_long_as_before_have_settled():
    assert settles([0.01] * 50) == 10
    assert settles([0.01] * 9) is None


def test_a_first_step_that_compiles_is_within_the_warm_up():
    assert settles([30.0] + [0.01] * 50) == 10


def test_steps_that_fall_have_not_settled():
    falling = [0.1 * 0.95**n for n in range(40)]
    assert settles(falling) is None
    assert 45 <= settles(falling + [falling[-1]] * 40) <= 50


def test_a_quick_step_does_not_end_the_warm_up():
    falling = [0.1 * 0.95**n for n in range(40)]
    falling[20] = 1e-4
    assert settles(falling) is None


def test_slow_steps_neither_end_nor_prolong_the_warm_up():
    falling = [0.1 * 0.95**n for n in range(40)]
    falling[20] = falling[27] = 3.0
    assert settles(falling) is None
    steady = [0.01] * 50
    steady[3] = steady[4] = 3.0
    assert settles(steady) == 10


def test_rising_steps_have_settled():
    assert settles([0.01 * 1.05**n for n in range(20)]) == 10


def test_a_warm_up_has_an_end():
    endless = [0.9**n for n in range(MOST_WARM_UP_STEPS + 10)]
    assert settles(endless) == MOST_WARM_UP_STEPS


def test_processor_time_of_other_numbers_of_threads_says_nothing():
    pairs = PairedClocks(0.04, wall_alone=True)
    for wall in FASTER:
        pairs.add(StepTime(1.0, 2.0), StepTime(wall, 0.9))
    assert pairs.verdict() == "undecided"
    few, shared = PairedClocks(0.05, wall_alone=True), PairedClocks(0.05)
    for _ in range(10):
        few.add(StepTime(1.0, 1.0), StepTime(0.9, 1.0))
        shared.add(StepTime(1.0, 1.0), StepTime(0.9, 1.0))
    assert (few.verdict(), shared.verdict()) == ("faster", "undecided"), "it has all of alpha"
