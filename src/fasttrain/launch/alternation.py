"""Has two runs train in turns, and collects their losses and times.

After a warm-up, each round is one block of steps of the plain run and one of the chosen run, in an
order that a fair coin draws. Controls, whose times don't matter, train afterwards, each alone.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from fasttrain.model.proof import Side, Speed, Took, Turn
from fasttrain.statistics.paired import (
    MOST_WARM_UP_STEPS,
    WARM_UP_WINDOW,
    PairedClocks,
    StepTime,
    block_steps,
    block_time,
    settled,
)

ALPHA = 0.05  # that the interval of the ratio is ever wrong
CONTROL_STEPS = 20  # in one turn
COMPARED: tuple[Side, Side] = ("plain", "chosen")


class Taking(Protocol):
    """Runs that take turns, such as `fasttrain.launch.sides.Sides`."""

    def take(self, side: Side, turn: Turn) -> Took | None:
        """Have a side take its turn; None if it has ended without a word."""


@dataclass(slots=True)
class Followed:
    """What is known of one run.

    Attributes:
        losses: The loss of each step.
        step_s: Times of steps, those of the first one left out.
        spent_s: Time of all its turns.
        begun_s: That up to the end of the warm-up.
        ended: Whether it has ended.
        passes: Backward passes.
        threads: Threads that torch computes one operation with; 0 while unknown.
        parted: How the steps of its ranks differ, as a sentence; empty if they don't.
        draws: Whether its ranks draw random numbers that one process doesn't draw.
        threads_train: Whether several threads of the script made steps at the same time.
    """

    losses: list[float | None] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    begun_s: float = 0.0
    ended: bool = False
    passes: int = 0
    threads: int = 0
    parted: str = ""
    draws: bool = False
    threads_train: bool = False


class Alternation:
    """Turns of two runs.

    Args:
        taking: Gives the turns.
        steps: Steps of each run.
        told: Called with the steps that were taken so far, after each round.
        coin: Draws the order.
        clocks: Pairs of blocks, to which those of these runs are added; by default new ones.
        enough: Returns whether the turns may end before all steps were taken.
        warm_up: Most steps of the warm-up; few do where earlier runs have been timed like these, as
            what is left of it cancels out.
        pause_s: Seconds between timed turns, in which threads of the run that has had its turn stop
            looking for work.

    Attributes:
        runs: What is known of each run.
        clocks: The pairs of blocks.
    """

    def __init__(
        self,
        taking: Taking,
        steps: int,
        told: Callable[[int], None] = lambda _: None,
        coin: random.Random | None = None,
        *,
        clocks: PairedClocks | None = None,
        enough: Callable[[], bool] = lambda: False,
        warm_up: int = MOST_WARM_UP_STEPS,
        pause_s: float = 0.0,
    ) -> None:
        self.runs: dict[Side, Followed] = {side: Followed() for side in COMPARED}
        self._taking, self._most, self._told = taking, steps, told
        self._coin = coin or random.SystemRandom()
        self.clocks = PairedClocks(ALPHA) if clocks is None else clocks
        self._enough, self._warm_up, self._pause_s = enough, warm_up, pause_s
        self._blocks: dict[Side, list[float]] = {side: [] for side in COMPARED}
        self._begun_steps = 0

    def run(self) -> None:
        """Take all steps, or those that there are."""
        # What the first one finds on a cold disk counts against it: not for the levers.
        self._round(1, order=("chosen", "plain"))
        while not self._is_over and not self._settled():
            self._round(min(WARM_UP_WINDOW, self._left), one_by_one=True)
        self._begun_steps = self.steps
        for run in self.runs.values():
            run.begun_s = run.spent_s
        length = block_steps([time_s for side in COMPARED for time_s in self.runs[side].step_s])
        while not self._is_over and self._left > length:
            self._pair(length)
        if not self._is_over and self._left:
            self._round(self._left)

    def follow(self, side: Side) -> Followed:
        """Have another run take as many steps, and return what is known of it."""
        run = self.runs[side] = Followed()
        while not run.ended and (left := self.steps - len(run.losses)) > 0:
            self._take(side, Turn(min(left, CONTROL_STEPS)))
            self._told(len(run.losses))
        return run

    @property
    def steps(self) -> int:
        """Steps that both runs have taken."""
        return min(len(self.runs[side].losses) for side in COMPARED)

    @property
    def is_complete(self) -> bool:
        """True if all steps were taken."""
        return self.steps >= self._most

    def speed(self) -> Speed | None:
        """Return how long steps take; None if no two blocks were timed."""
        if not all(self._blocks.values()):
            return None
        verdict, ratio = self.clocks.verdict(), self.clocks.ratio()
        plain_s, chosen_s = (median(self._blocks[side]) for side in COMPARED)
        plain, chosen = (self.runs[side] for side in COMPARED)
        extra_s, gain_s = chosen.begun_s - plain.begun_s, plain_s - chosen_s
        pays = None
        if verdict == "faster" and gain_s > 0:
            pays = self._begun_steps + math.ceil(max(0.0, extra_s) / gain_s)
        return Speed(
            verdict=verdict,
            ratio=ratio,
            step_s=chosen_s,
            plain_step_s=plain_s,
            pairs=len(self.clocks),
            begun_s=chosen.begun_s,
            plain_begun_s=plain.begun_s,
            begun_steps=self._begun_steps,
            pays_after=pays,
        )

    @property
    def _left(self) -> int:
        return self._most - self.steps

    @property
    def _is_over(self) -> bool:
        ended = any(self.runs[side].ended for side in COMPARED)
        return self._left <= 0 or ended or self._enough()

    def _settled(self) -> bool:
        most = min(self._warm_up, self._most // 3)
        return self.steps >= most or all(settled(self.runs[side].step_s) for side in COMPARED)

    def _round(
        self, steps: int, *, one_by_one: bool = False, order: tuple[Side, ...] | None = None
    ) -> None:
        for side in order or self._order():
            took = self._take(side, Turn(steps, one_by_one=one_by_one))
            if took is not None and one_by_one:
                self.runs[side].step_s += took.wall_s
        self._told(self.steps)

    def _pair(self, length: int) -> None:
        times: dict[Side, StepTime] = {}
        for side in self._order():
            time.sleep(self._pause_s)
            took = self._take(side, Turn(length + 1, untimed=1))
            if took is not None and took.wall_s and not took.ended:
                steps = zip(took.wall_s, took.processor_s, strict=True)
                times[side] = block_time([StepTime(*one) for one in steps])
        if all(side in times for side in COMPARED):
            for side in COMPARED:
                self._blocks[side].append(times[side].wall_s)
            self.clocks.add(times["plain"], times["chosen"])
        self._told(self.steps)

    def _order(self) -> tuple[Side, ...]:
        return COMPARED if self._coin.random() < 0.5 else COMPARED[::-1]

    def _take(self, side: Side, turn: Turn) -> Took | None:
        run = self.runs[side]
        if run.ended:
            return None
        took = self._taking.take(side, turn)
        if took is None:
            run.ended = True
            return None
        run.losses += took.losses
        run.spent_s += took.turn_s
        run.passes += took.passes
        run.threads = took.threads
        run.parted = took.parted
        run.draws = took.draws
        run.threads_train = took.threads_train
        run.ended = took.ended
        return took
