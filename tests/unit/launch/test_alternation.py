"""The turns of two runs: their order, what is timed, and where they end."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from fasttrain.launch.alternation import Alternation
from fasttrain.model.proof import Side, Took, Turn
from fasttrain.statistics.paired import PairedClocks, StepTime

START_S = 1.0


class Runs:
    """Runs whose steps take as long as they are told to."""

    def __init__(
        self, ends_after: int = 10**9, silent: Side | None = None, **step_s: float
    ) -> None:
        self.step_s = {"plain": 0.01, "chosen": 0.01, "control-1": 0.05, **step_s}
        self.turns: list[tuple[Side, Turn]] = []
        self.taken: Counter[str] = Counter()
        self._ends_after, self._silent = ends_after, silent
        self._noise = random.Random(7)

    def take(self, side: Side, turn: Turn) -> Took | None:
        """Take a turn."""
        self.turns.append((side, turn))
        if side == self._silent and self.taken[side]:
            return None
        first = not self.taken[side]
        steps = min(turn.steps, self._ends_after - self.taken[side])
        self.taken[side] += steps
        times = tuple(
            self.step_s[side] * self._noise.uniform(0.98, 1.02)
            for _ in range(max(0, steps - turn.untimed))
        )
        spent_s = (START_S * (2 if side == "chosen" else 1) if first else 0.0) + sum(times)
        return Took(
            steps=self.taken[side],
            losses=(1.0,) * steps,
            wall_s=times,
            processor_s=times,
            turn_s=spent_s,
            ended=steps < turn.steps,
            passes=steps,
        )


def alternate(runs: Runs, steps: int = 200) -> Alternation:
    turns = Alternation(runs, steps, coin=random.Random(5))
    turns.run()
    return turns


def test_both_take_all_steps_in_an_order_that_a_coin_draws() -> None:
    runs = Runs(chosen=0.008)
    turns = alternate(runs)
    assert turns.is_complete
    assert runs.taken == {"plain": 200, "chosen": 200}
    pairs = [runs.turns[at : at + 2] for at in range(0, len(runs.turns), 2)]
    assert all({side for side, _ in pair} == {"plain", "chosen"} for pair in pairs)
    assert all(one == other for (_, one), (_, other) in pairs), "each has as many steps"
    first = Counter(pair[0][0] for pair in pairs)
    assert min(first.values()) > len(pairs) / 4
    timed = [turn for _, turn in runs.turns if turn.untimed]
    assert timed
    assert {turn.untimed for turn in timed} == {1}


def test_a_faster_run_is_found_and_pays_once_its_start_is_made_up_for() -> None:
    speed = alternate(Runs(chosen=0.008)).speed()
    assert speed is not None
    assert speed.verdict == "faster"
    assert speed.ratio.low < 0.8 < speed.ratio.high < 1.0
    assert speed.step_s == pytest.approx(0.008, rel=0.02)
    assert speed.begun_s - speed.plain_begun_s == pytest.approx(START_S, abs=0.1)
    assert speed.pays_after is not None
    assert speed.pays_after == pytest.approx(START_S / 0.002, rel=0.2)


def test_a_slower_run_never_pays() -> None:
    speed = alternate(Runs(chosen=0.02)).speed()
    assert speed is not None
    assert (speed.verdict, speed.pays_after) == ("slower", None)


def test_a_script_that_ends_is_compared_as_far_as_it_went() -> None:
    turns = alternate(Runs(ends_after=57))
    assert not turns.is_complete
    assert turns.steps == 57


@pytest.mark.parametrize("silent", ["plain", "chosen"])
def test_a_run_that_ends_without_a_word_ends_the_other_after_its_turn(silent: Side) -> None:
    runs = Runs(silent=silent)
    turns = alternate(runs)
    assert turns.runs[silent].ended
    assert turns.steps == 1
    assert abs(runs.taken["plain"] - runs.taken["chosen"]) <= 5


def test_a_control_takes_as_many_steps_alone() -> None:
    runs = Runs(ends_after=57)
    turns = alternate(runs)
    assert len(turns.follow("control-1").losses) == 57
    alone = [side for side, _ in runs.turns if side == "control-1"]
    assert len(alone) > 1, "so that its progress can be told"


@pytest.mark.parametrize("steps", [1, 2, 5, 11, 12, 13, 14, 31])
def test_any_number_of_steps_is_taken_exactly(steps: int) -> None:
    runs = Runs()
    turns = alternate(runs, steps)
    assert turns.is_complete
    assert runs.taken == {"plain": steps, "chosen": steps}
    assert all(turn.steps > 0 for _, turn in runs.turns)
    for (_, one), (_, other) in pairwise(runs.turns[::2]):
        assert one.steps <= steps >= other.steps


def test_turns_end_once_it_is_enough_and_pairs_go_on_in_another_start() -> None:
    clocks = PairedClocks(0.05)
    Alternation(Runs(ends_after=40, chosen=0.008), 10**9, clocks=clocks).run()
    before = len(clocks)
    assert before > 0, "it ends with the script"
    turns = Alternation(
        Runs(chosen=0.008), 10**9, clocks=clocks, enough=lambda: len(clocks) >= before + 3
    )
    turns.run()
    assert len(clocks) == before + 3
    speed = turns.speed()
    assert speed is not None
    assert speed.pairs == before + 3


def test_a_start_without_a_pair_has_no_speed() -> None:
    clocks = PairedClocks(0.05)
    clocks.add(StepTime(1.0, 1.0), StepTime(0.5, 0.5))
    turns = Alternation(Runs(ends_after=3), 10**9, clocks=clocks)
    turns.run()
    assert turns.speed() is None


def test_there_is_a_pause_before_each_timed_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("fasttrain.launch.alternation.time.sleep", pauses.append)
    runs = Runs()
    Alternation(runs, 60, pause_s=0.25).run()
    timed = [turn for _, turn in runs.turns if turn.untimed]
    assert pauses == [0.25] * len(timed)
