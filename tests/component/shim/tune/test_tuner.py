"""The tuner on a clock of its own: what it compares, keeps and writes."""

from __future__ import annotations

import importlib
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.files import load
from fasttrain.model.outcome import State
from fasttrain.model.tuning import (
    TUNING_FILE,
    TUNING_STATE_FILE,
    Parity,
    Tuning,
    TuningReport,
    TuningState,
)
from fasttrain.shim.tune import tuner as tuner_module
from fasttrain.shim.tune.ranks import Alone
from fasttrain.shim.tune.tuner import LATE, Tuner
from support.fake_levers import FakeLever

RIGHT = Parity(True, "equal")
WRONG = Parity(False, "0.01 of at most 0.0001")
STEP_S = 0.01
IDLE = "no optimizer has such a kernel"


class FakeRepeats:
    """Finds what it is told to."""

    def __init__(self, found: Parity) -> None:
        self.found = found
        self.asked: list[tuple[float, bool]] = []

    @contextmanager
    def of_calls(self, rounds: float, *, eager: bool) -> Iterator[Any]:
        """Yield what switches as the real one does."""
        self.asked.append((rounds, eager))

        def compare(plain: Callable[[], None], changed: Callable[[], None]) -> Parity:
            changed()
            plain()
            return self.found

        yield compare

    @contextmanager
    def of_step(self, _: Any, rounds: float) -> Iterator[Callable[[], Parity]]:
        self.asked.append((rounds, False))
        yield lambda: self.found


class Loop:
    """A loop whose steps take as long as a function of the levers that are on says."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        step_s: Callable[..., float],
        *names: str,
        noise: float = 0.02,
        budget_s: float = 300.0,
        parity: Parity = RIGHT,
        state: State = State.APPLIED,
        seed: int = 5,
        earlier: str = "",
    ) -> None:
        self.now_s = 100.0
        self.folder = folder
        self.meter: Any = SimpleNamespace(steps=0, device="")
        self._step_s, self._noise, self._random = step_s, noise, random.Random(3)
        for clock in ("perf_counter", "process_time"):
            monkeypatch.setattr(tuner_module.time, clock, lambda: self.now_s)
        self.levers = {name: FakeLever(name, state, IDLE) for name in names}
        asked = Tuning(budget_s, "", (), seed=seed, earlier=earlier)
        self.repeats: Any = FakeRepeats(parity)
        rounds = {name: 2.0 ** (at - 24) for at, name in enumerate(names)}
        how = asked, self.levers, rounds, self.meter, self.repeats, folder
        self.tuner = Tuner(*how, Alone(self.now_s))

    @property
    def on(self) -> dict[str, bool]:
        return {name: lever.on for name, lever in self.levers.items()}

    def steps(self, most: int = 200_000) -> Iterator[int]:
        for step in range(most):
            if self.tuner.done:
                return
            # As other programs do: most steps are a little slower, some are far slower.
            slower = 1 + self._noise * self._random.expovariate(1.0)
            slower += 3.0 * (self._random.random() < 0.01)
            self.now_s += self._step_s(**self.on) * slower
            self.meter.steps += 1
            yield step
            self.tuner.after_step()

    def run(self) -> TuningReport:
        for _ in self.steps():
            pass
        self.tuner.finish()
        return self.report()

    def report(self) -> TuningReport:
        return load(TuningReport, self.folder / TUNING_FILE)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Loop]:
    def make(step_s: Callable[..., float], *names: str, **options: Any) -> Loop:
        return Loop(monkeypatch, tmp_path, step_s, *names, **options)

    return make


def verdicts(report: TuningReport) -> dict[str, str]:
    return {one.levers[0]: one.verdict for one in report.compared}


def test_a_fork_writes_nothing_of_its_parents(loop: Any, monkeypatch: Any) -> None:
    made = loop(lambda a: STEP_S * (0.9 if a else 1), "a")
    for _ in made.steps(20):
        pass
    before = (made.folder / TUNING_FILE).read_bytes()
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        on = made.on
        for _ in made.steps(1000):
            pass
        made.tuner.finish()
    assert (made.on, (made.folder / TUNING_FILE).read_bytes()) == (on, before)
    assert made.run().end == "decided"


def test_the_faster_is_kept_and_the_slower_is_not(loop: Any) -> None:
    report = loop(lambda a, b: STEP_S * (0.9 if a else 1) * (1.1 if b else 1), "a", "b").run()
    assert report.end == "decided"
    assert verdicts(report) == {"a": "faster", "b": "slower"}
    assert report.kept == ("a",)
    first, second = report.compared
    assert first.ratio.low <= 0.9 <= first.ratio.high
    assert second.ratio.low <= 1.1 <= second.ratio.high
    assert report.together is None, "one lever is compared with plain already"
    assert report.noise is not None
    assert report.noise.ratio.low <= 1.0 <= report.noise.ratio.high


def test_all_that_is_kept_is_compared_with_plain(loop: Any) -> None:
    report = loop(lambda a, b: STEP_S * (0.9 if a else 1) * (0.8 if b else 1), "a", "b").run()
    assert report.kept == ("a", "b")
    assert report.together is not None
    assert report.together.ratio.low <= 0.72 <= report.together.ratio.high
    assert report.together.levers == ("a", "b")


def test_a_lever_that_hurts_beside_a_later_one_is_dropped(loop: Any) -> None:
    def step_s(a: bool, b: bool) -> float:
        return STEP_S * (0.5 if b and not a else 0.6 if b else 0.9 if a else 1)

    report = loop(step_s, "a", "b").run()
    assert report.kept == ("b",)
    dropped = report.compared[0]
    assert (dropped.kept, dropped.verdict) == (False, "slower")
    assert dropped.ratio.low <= 1.2 <= dropped.ratio.high
    assert dropped.parity == RIGHT
    assert report.together is not None, "b was compared beside a only"
    assert report.together.ratio.low <= 0.5 <= report.together.ratio.high
    assert "b" in dropped.reason


def paying_together(a: bool, b: bool) -> float:
    """Return the time of a step with levers of which each alone is slower than none."""
    return STEP_S * (0.8 if a and b else 1.05 if a or b else 1)


def test_levers_that_pay_together_alone_are_found(loop: Any) -> None:
    report = loop(paying_together, "a", "b").run()
    assert report.end == "decided"
    assert report.kept == ("a", "b")
    for one, other in zip(report.compared, ("b", "a"), strict=True):
        assert one.verdict == "faster"
        assert one.ratio.low <= 0.8 <= one.ratio.high
        assert one.parity == RIGHT
        assert other in one.reason
        assert "x 1.0" in one.reason
    assert report.together is None, "both were compared with plain already"


def test_a_lever_that_pays_beside_a_later_one_is_found(loop: Any) -> None:
    def step_s(a: bool, b: bool) -> float:
        return STEP_S * (0.7 if a and b else 0.8 if b else 1.05 if a else 1)

    report = loop(step_s, "a", "b").run()
    assert report.kept == ("a", "b")
    assert report.together is not None
    assert report.together.ratio.low <= 0.7 <= report.together.ratio.high


def test_one_of_two_that_only_hurts_is_dropped_again(loop: Any) -> None:
    def step_s(a: bool, b: bool, c: bool) -> float:
        return STEP_S * (0.8 if a and b else 1.05 if a or b else 1) * (1.05 if c else 1)

    report = loop(step_s, "a", "b", "c").run()
    assert report.kept == ("a", "b")


@pytest.mark.parametrize("parity", [WRONG, Parity(None, "nothing was captured")])
def test_what_may_be_wrong_is_not_tried_together(loop: Any, parity: Parity) -> None:
    assert loop(paying_together, "a", "b", parity=parity).run().kept == ()


def test_what_is_far_slower_is_not_tried_together(loop: Any) -> None:
    found = []

    def step_s(a: bool, b: bool) -> float:
        found.append((a, b))
        return STEP_S * (1.2 if a else 1) * (1.2 if b else 1)

    assert loop(step_s, "a", "b").run().kept == ()
    assert (True, True) not in found


def test_equal_levers_make_no_difference(loop: Any) -> None:
    report = loop(lambda a: STEP_S, "a", noise=0.005).run()
    assert verdicts(report) == {"a": "same"}
    assert report.kept == ()


@pytest.mark.parametrize(
    ("parity", "verdict"), [(WRONG, "wrong"), (Parity(None, "nothing was captured"), "faster")]
)
def test_what_is_not_known_to_be_right_is_not_kept(loop: Any, parity: Parity, verdict: str) -> None:
    report = loop(lambda a: STEP_S * (0.5 if a else 1), "a", parity=parity).run()
    assert verdicts(report) == {"a": verdict}
    assert report.kept == ()
    assert parity.reason in report.compared[0].reason
    assert ("wrong" in report.compared[0].reason) == (verdict == "wrong")
    assert (report.compared[0].pairs == 0) == (verdict == "wrong"), "wrong ones aren't timed"


def test_results_are_judged_by_all_that_is_on(loop: Any) -> None:
    made = loop(lambda **on: STEP_S * (0.9 if on["compile"] else 1), "compile", "amp")
    made.run()
    assert made.repeats.asked == [(2.0**-24, False), (2.0**-23, False)]
    made = loop(lambda a, b: STEP_S * (0.9 if a else 1), "a", "b")
    made.run()
    assert made.repeats.asked == [(2.0**-24, True), (2.0**-23, True)]
    # Rounding by less doesn't make what is on already round by less.
    made = loop(lambda a, b: STEP_S * (0.9 if a else 1), "a", "b")
    made.tuner._rounds = {"a": 0.5, "b": 0.25}
    made.run()
    assert made.repeats.asked == [(0.5, True), (0.5, True)]


def test_an_optimizers_step_has_its_own_rounding_beside_levers_of_the_model(loop: Any) -> None:
    made = loop(lambda amp, fused: STEP_S * (0.9 if amp else 1), "amp", "fused")
    made.tuner._rounds = {"amp": 2.0**-8, "fused": 2.0**-24}
    made.levers["fused"].around_step = nullcontext
    report = made.run()
    assert report.kept == ("amp",)
    assert made.repeats.asked == [(2.0**-8, True), (2.0**-24, False)]


def test_what_a_switch_costs_once_is_not_in_the_times(loop: Any) -> None:
    before = [False]

    def step_s(a: bool) -> float:
        switched, before[0] = a and not before[0], a
        return STEP_S * (8 if switched else 1)

    assert verdicts(loop(step_s, "a", noise=0.005).run()) == {"a": "same"}


def test_a_warm_up_that_does_not_end_ends_with_the_budget(loop: Any) -> None:
    made = loop(lambda a: 1000.0 / (1 + made.meter.steps) ** 2, "a", noise=0.0, budget_s=1700.0)
    made.run()
    assert made.now_s - 100.0 < 1720.0


def test_a_lever_without_effect_is_not_timed(loop: Any) -> None:
    report = loop(lambda a: STEP_S, "a", state=State.ARMED).run()
    assert verdicts(report) == {"a": "no effect"}
    assert report.compared[0].reason == "no optimizer has such a kernel"
    assert report.compared[0].pairs == 0


def test_the_first_use_has_a_price(loop: Any) -> None:
    used: list[int] = []

    def step_s(a: bool) -> float:
        used.append(1) if a else None
        return 7.0 if len(used) == 1 and a else STEP_S * (0.8 if a else 1)

    one = loop(step_s, "a").run().compared[0]
    assert one.kept
    assert one.first_use_s == pytest.approx(7.0, rel=0.1)
    assert one.step_s < 0.02, "the first step isn't in it"


def test_the_price_is_not_lost_by_a_second_comparison(loop: Any) -> None:
    used: list[int] = []

    def step_s(a: bool, b: bool) -> float:
        used.append(1) if a else None
        return 7.0 if len(used) == 1 and a else STEP_S * (0.99 if a else 1)

    made = loop(step_s, "a", "b", noise=0.2, budget_s=60.0)
    turns = [made.report().comparing for _ in made.steps()]
    assert ("a",) in turns[turns.index(("b",)) :], "compared again, after the other one"
    one = made.report().compared[0]
    assert one.first_use_s == pytest.approx(7.0, rel=0.3)


def test_a_budget_is_kept(loop: Any) -> None:
    made = loop(lambda a, b: STEP_S, "a", "b", noise=0.5, budget_s=5.0)
    report = made.run()
    assert report.end == "budget"
    assert made.now_s - 100.0 == pytest.approx(5.0, abs=0.5)
    assert report.wall_s == pytest.approx(made.now_s - 100.0)


def test_what_was_not_come_to_says_so(loop: Any) -> None:
    report = loop(lambda a, b: 2.0, "a", "b", budget_s=10.0).run()
    assert {one.reason for one in report.compared} == {LATE}
    assert set(verdicts(report).values()) == {"undecided"}


def test_a_script_that_ends_leaves_what_was_found(loop: Any) -> None:
    made = loop(lambda a, b: STEP_S * (0.8 if a else 1), "a", "b", noise=0.2)
    for _ in made.steps():
        if made.tuner.done or made.report().compared:
            break
    made.tuner.finish()
    report = made.report()
    assert report.end == "script"
    assert [one.levers for one in report.compared] == [("a",)]


def test_before_the_first_step_everything_is_off(loop: Any) -> None:
    assert loop(lambda a, b: STEP_S, "a", "b").on == {"a": False, "b": False}


def test_at_most_one_lever_differs_in_a_comparison(loop: Any) -> None:
    made = loop(lambda a, b, c: STEP_S * (0.9 if a else 1), "a", "b", "c", budget_s=60.0)
    seen: dict[tuple[str, ...], set[tuple[bool, ...]]] = {}
    for _ in made.steps():
        report = made.report() if (made.folder / TUNING_FILE).exists() else None
        if report is not None:
            seen.setdefault(report.comparing, set()).add(tuple(made.on.values()))
    for levers, states in seen.items():
        if len(levers) == 1:
            others = {tuple(s for n, s in zip("abc", state, strict=True) if n not in levers)
                      for state in states}  # fmt: skip
            assert len(others) <= 2, "that of the comparison before, at its last step"


class Starts:
    """Starts of a script that ends after some steps, each of which goes on from the one before."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, step_s: Callable[..., float]
    ) -> None:
        self._monkeypatch, self._folder, self._step_s = monkeypatch, folder, step_s
        self.loops: list[Loop] = []

    def start(self, steps: int, *, ends: str = "by itself", **options: Any) -> TuningReport:
        """Start the script once, and return the result."""
        folder = self._folder / f"{len(self.loops)}"
        folder.mkdir()
        earlier = str(self.loops[-1].folder) if self.loops else ""
        seed = len(self.loops)
        loop = Loop(self._monkeypatch, folder, self._step_s, "a", "b",
                    seed=seed, earlier=earlier, **options)  # fmt: skip
        self.loops.append(loop)
        for _ in loop.steps(steps):
            pass
        if ends == "by itself":
            loop.tuner.finish()
        return loop.report()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Starts]:
    return lambda step_s: Starts(monkeypatch, tmp_path, step_s)


def _both(a: bool, b: bool) -> float:
    return STEP_S * (0.9 if a else 1) * (1.1 if b else 1)


def test_a_script_that_ends_early_is_compared_over_several_starts(starts: Any) -> None:
    made = starts(_both)
    reports = [made.start(150)]
    while reports[-1].end == "script":
        assert len(reports) < 100
        reports.append(made.start(150))
    assert len(reports) > 3
    report = reports[-1]
    assert report.end == "decided"
    assert verdicts(report) == {"a": "faster", "b": "slower"}
    assert report.kept == ("a",)
    assert report.starts == len(reports)
    assert report.steps == sum(loop.meter.steps for loop in made.loops)
    assert report.wall_s == pytest.approx(sum(loop.now_s - 100.0 for loop in made.loops))
    compared = [one for one in (report.noise, *report.compared) if one is not None]
    assert sum(one.pairs for one in compared) > 30, "pairs of all starts count"
    assert sum(one.steps for one in compared) <= report.steps
    for earlier, later in pairwise(reports):
        assert later.compared[: len(earlier.compared)] == earlier.compared, "made once"


def test_ten_steps_are_enough_for_a_pair(starts: Any) -> None:
    made = starts(_both)
    reports = [made.start(10) for _ in range(4)]
    states = [load(TuningState, loop.folder / TUNING_STATE_FILE) for loop in made.loops]
    assert [state.progress[1] for state in states] == [0, 1, 2, 3]
    assert [report.starts for report in reports] == [1, 2, 3, 4]


def test_a_start_counts_before_its_first_step(starts: Any) -> None:
    made = starts(_both)
    before = made.start(400)
    after = made.start(0, ends="by os._exit")
    assert (after.end, after.starts, after.compared) == ("running", 2, before.compared)


def test_results_of_calls_are_compared_once(starts: Any) -> None:
    made = starts(lambda a, b: STEP_S * (0.97 if a else 1))
    while made.start(90, noise=0.1).end == "script":
        assert len(made.loops) < 300
    assert sum(len(loop.repeats.asked) for loop in made.loops) == 2


def test_a_start_that_ends_at_once_loses_nothing(starts: Any) -> None:
    made = starts(_both)
    before = made.start(400)
    assert before.end == "script"
    assert before.compared
    after = made.start(3)
    assert after.compared == before.compared
    assert (after.end, after.starts) == ("script", 2)


def test_what_ends_without_a_word_goes_on_with_what_was_saved(starts: Any) -> None:
    made = starts(lambda a, b: STEP_S * (0.97 if a else 1))
    made.start(1000, ends="by os._exit", noise=0.1)
    progress = load(TuningState, made.loops[0].folder / TUNING_STATE_FILE).progress
    assert progress[1] > 20


def test_the_pairs_of_a_start_that_ends_soon_are_saved(starts: Any) -> None:
    made = starts(_both)
    made.start(20, ends="by os._exit")
    made.start(20, ends="by os._exit")
    states = [load(TuningState, loop.folder / TUNING_STATE_FILE) for loop in made.loops]
    assert 0 < states[0].progress[1] < states[1].progress[1]


def test_a_share_of_time_is_not_given_twice(starts: Any) -> None:
    made = starts(lambda a, b: STEP_S)
    budget_s = 40.0
    while made.start(100, noise=1.0, budget_s=budget_s).end == "script":
        budget_s -= made.loops[-1].now_s - 100.0
    spent = [one.levers for one in made.loops[-1].report().compared]
    assert spent == [("a",), ("b",)], "the noise had a tenth, and both their turn"


def test_a_lever_that_does_less_beside_another_is_named(loop: Any) -> None:
    def step_s(a: bool, b: bool) -> float:
        return STEP_S * (0.47 if a and b else 0.5 if b else 0.8 if a else 1)

    first = loop(step_s, "a", "b").run().compared[0]
    assert first.kept
    assert "b" in first.reason
    assert first.ratio.low <= 0.8 <= first.ratio.high


def test_the_price_of_all_is_the_sum(loop: Any) -> None:
    used: list[int] = []

    def step_s(a: bool, b: bool) -> float:
        used.append(1) if a else None
        return 7.0 if len(used) == 1 and a else STEP_S * (0.8 if a else 1) * (0.8 if b else 1)

    report = loop(step_s, "a", "b").run()
    assert report.together is not None
    assert report.together.first_use_s == pytest.approx(7.0, rel=0.2)
    assert report.together.pays_after == pytest.approx(7.0 / (STEP_S * 0.36), rel=0.3)
    assert report.compared[0].pays_after == pytest.approx(7.0 / (STEP_S * 0.2), rel=0.3)


def test_the_benchmark_of_results_compares_each_lever_alone_and_on_top(
    loop: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks" / "scripts"))
    alone = importlib.import_module("results_alone")
    monkeypatch.setattr(Tuner, "_compare_now", alone.results_of)

    def compared(parity: Parity) -> list[list[str]]:
        alone.done.clear()
        file = tmp_path / "results.jsonl"
        file.unlink(missing_ok=True)
        loop(lambda a, b: STEP_S, "a", "b", parity=parity).run()
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert {line["right"] for line in lines} == {parity.right}
        return [line["levers"] for line in lines]

    assert compared(RIGHT) == [["a"], ["b"], ["a", "b"]]
    assert compared(WRONG) == [["a"], ["b"]]
