"""Decides from pairs of blocks of steps whether a change makes a training loop faster.

Two blocks that follow each other make a pair: one is plain, one has the change, and a fair coin
draws their order. If the change multiplies the time of a block by r, then ratio / r is x or 1 / x,
where x is the ratio of the two blocks in the order in which they ran, and the coin says which. So
whether the ratio is above r is a fair coin, independent of all earlier pairs, whatever the noise
is: load, drift, heavy tails, a slow minute. Nothing is assumed about its distribution.

`PairedRatios` looks after each pair whether the counts are still those of a fair coin. It bets
against the coin, by a mixture of all biases: the gain of a fair game is a martingale, and by
Ville's inequality it ever reaches 1 / alpha with a probability of at most alpha. The values of r
against which that much was gained are excluded. So the interval holds at every look, and one may
stop as soon as it decides. Its ends are order statistics of the ratios.

What the caller has to keep to:

- Both blocks of a pair have as many steps, a number that is chosen before the coin is thrown.
- The first step of each block isn't timed, whether or not anything was switched there: left out
  after switches alone, the time of a block would depend on the coin without any change.
- The coin is not the script's random state.

Source: J. Ville, Étude critique de la notion de collectif, 1939; S. Howard and A. Ramdas,
Sequential estimation of quantiles with applications to A/B testing and best-arm identification,
Bernoulli 28(3), 2022, https://arxiv.org/abs/1906.09712.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from fasttrain.model.tuning import UNBOUNDED, Ratio, Verdict

ALPHA = 0.05  # that any verdict of one run is wrong
TURNS = 3  # most comparisons for each lever: two of its own, and without it or all together
SAME = 0.01  # a change that surely matters less than this is none
# Both parameters of the Beta distribution of biases to bet on. At alpha 0.02, 1 (uniform) decides
# after 9 pairs that all agree, and 3 after 12; but where every third or fourth disagrees, as under
# the load of benchmarks/tune_power.py, 3 needs a tenth fewer. More than 3 hardly gains.
PRIOR = 3.0
# Short blocks: other load then changes less often between two neighbours, and there are more coins.
MIN_BLOCK_S = 0.01
MIN_TIMED_STEPS = 2
WARM_UP_WINDOW = 5
MOST_WARM_UP_STEPS = 100
STILL_FALLING = 0.02  # a warm-up goes on while the median falls by more than this


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step by two clocks, in seconds.

    Attributes:
        wall_s: By `time.perf_counter`.
        processor_s: By `time.process_time`: all threads, without what other processes took.
    """

    wall_s: float
    processor_s: float


class PairedRatios:
    """The ratios of times with a change over those without, and what is certain about them.

    Args:
        alpha: Probability that the interval is ever wrong, over all looks together.
    """

    def __init__(self, alpha: float) -> None:
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha is {alpha}, and has to be between 0 and 1")
        self._alpha = alpha
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self._ascending)

    def add(self, plain_s: float, changed_s: float) -> None:
        """Add a pair of blocks.

        Args:
            plain_s: Time of a step of the block without the change.
            changed_s: Time of a step of the block with it.

        Raises:
            ValueError: If one of them, or their ratio, is not a positive finite number.
        """
        for seconds in (plain_s, changed_s):
            _check(seconds, "a time in seconds")
        ratio = changed_s / plain_s
        _check(ratio, "a ratio of times")
        insort(self._ascending, ratio)

    def add_ratios(self, ratios: Sequence[float]) -> None:
        """Add ratios of pairs that were timed before; raises ValueError as `add` does."""
        for ratio in ratios:
            _check(ratio, "a ratio of times")
        self._ascending = sorted([*self._ascending, *ratios])

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratios of all pairs, in ascending order."""
        return tuple(self._ascending)

    def ratio(self) -> Ratio:
        """Return the confidence interval of the ratio and the median of the pairs.

        It is 0 to `UNBOUNDED` as long as so few pairs exclude nothing.
        """
        middle = median(self._ascending) if self._ascending else 1.0
        outside = excluded(len(self), self._alpha)
        if outside == 0:
            return Ratio(0.0, middle, UNBOUNDED)
        return Ratio(self._ascending[outside - 1], middle, self._ascending[-outside])

    def verdict(self) -> Verdict:
        """Return what the pairs so far say about the change."""
        ratio = self.ratio()
        if ratio.high < 1.0:
            return "faster"
        if ratio.low > 1.0:
            return "slower"
        if ratio.low >= 1.0 - SAME and ratio.high <= 1.0 + SAME:
            return "same"
        return "undecided"


class PairedClocks:
    """Pairs of blocks that are timed by wall clock and by processor time, for training on a CPU.

    Where other processes take turns with the script on a core, the wall time of a step of 10 ms
    doubles now and then, and its processor time does not. But only wall time is what a user waits
    for: a change that uses fewer threads, or only waits less, shows there alone. So wall time
    decides if it can, and processor time only between faster and slower, and only if the median of
    wall time is on the same side. Each clock has half of alpha. The ratio is wall time's, whoever
    decides: how much less processor time a change takes, over all threads, says nothing about how
    much sooner a step is over.

    Where the two sides have different numbers of threads, processor time says nothing, as it is the
    sum over all of them: one thread takes less of it than two, and longer.

    Args:
        alpha: Probability that the verdict is ever faster or slower without any change.
        wall_alone: Whether wall time decides alone, with all of alpha.

    Attributes:
        wall: The ratios of wall times.
        processor: The ratios of processor times.
    """

    def __init__(self, alpha: float, *, wall_alone: bool = False) -> None:
        self.wall = PairedRatios(alpha if wall_alone else alpha / 2)
        self.processor = PairedRatios(alpha / 2)
        self._wall_alone = wall_alone

    def __len__(self) -> int:
        return len(self.wall)

    def add(self, plain: StepTime, changed: StepTime) -> None:
        """Add a pair of blocks; raises ValueError for what `PairedRatios.add` refuses."""
        self.wall.add(plain.wall_s, changed.wall_s)
        self.processor.add(plain.processor_s, changed.processor_s)

    def ratio(self) -> Ratio:
        """Return the ratio of wall times; 1 is in it where processor time alone decides."""
        return self.wall.ratio()

    def verdict(self) -> Verdict:
        """Return what the pairs so far say about the change."""
        return self._witness().verdict()

    def _witness(self) -> PairedRatios:
        if self.wall.verdict() == "undecided" and not self._wall_alone:
            middle, verdict = self.wall.ratio().middle, self.processor.verdict()
            if (verdict == "faster" and middle < 1.0) or (verdict == "slower" and middle > 1.0):
                return self.processor
        return self.wall


def share(levers: int) -> float:
    """Return the alpha of each comparison in a run that compares so many levers."""
    return ALPHA / (TURNS * max(1, levers))


def excluded(pairs: int, alpha: float) -> int:
    """Return the rank, counted from either end, of the ratios that end the interval.

    A value is excluded if fewer ratios than this are at most as large, or at least as large. A
    ratio that equals the value counts against excluding it on either side: conservative, as a coin
    could have put it on one.

    Args:
        pairs: Number of ratios.
        alpha: Probability that a fair coin is ever taken for a biased one.

    Returns:
        The rank of the smallest and the largest ratio is 1; 0 if no value is excluded.
    """
    needed = -math.log(alpha)
    # From all on one side to half and half, where it is never above 1, the gain falls.
    half = range(pairs // 2 + 1)
    return bisect_left(half, -needed, key=lambda heads: -log_gain(heads, pairs))


def log_gain(heads: int, tosses: int) -> float:
    """Return the logarithm of what betting on all biases has made of 1, against a fair coin.

    It is 2^n B(k + a, n - k + a) / B(a, a) for k heads in n tosses and a = `PRIOR`.

    Source: H. Robbins, Statistical methods related to the law of the iterated logarithm, Annals of
        Mathematical Statistics 41(5), 1970.
    """
    tails = tosses - heads
    gained = _log_beta(heads + PRIOR, tails + PRIOR) - _log_beta(PRIOR, PRIOR)
    return tosses * math.log(2.0) + gained


def block_steps(recent_s: Sequence[float]) -> int:
    """Return how many steps of each block to time, after the one that isn't timed.

    Args:
        recent_s: Times of some steps.
    """
    step_s = median(recent_s) if recent_s else 0.0
    lasting = math.ceil(MIN_BLOCK_S / step_s) if step_s > 0.0 else 0
    return max(MIN_TIMED_STEPS, lasting)


def block_time(steps: Sequence[StepTime]) -> StepTime:
    """Return the usual time of a step of a block, by each clock: the median, the lower one of two.

    A mean would hold all that other load took, and decides half as often under such load. What
    happens in a minority of the steps of a block isn't seen: what compiling costs is counted
    elsewhere.
    """
    return StepTime(
        median_low(step.wall_s for step in steps), median_low(step.processor_s for step in steps)
    )


def settled(step_s: Sequence[float]) -> bool:
    """Return whether a warm-up is over: the times of steps no longer fall, or there are too many.

    Medians are compared, so that a single slow step neither prolongs the warm-up nor ends it. What
    falls more slowly than this cancels out between neighbouring blocks.

    Args:
        step_s: Times of all steps since the warm-up began.
    """
    if len(step_s) >= MOST_WARM_UP_STEPS:
        return True
    if len(step_s) < 2 * WARM_UP_WINDOW:
        return False
    before = median(step_s[-2 * WARM_UP_WINDOW : -WARM_UP_WINDOW])
    return median(step_s[-WARM_UP_WINDOW:]) >= (1.0 - STILL_FALLING) * before


def _check(number: float, what: str) -> None:
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"{number} is not {what}")


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
