"""Settings of the process that are compared by runs: verdicts, starts, and what is kept."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli import tuning_settings
from fasttrain.cli.tuning_settings import Ground, SettingsSearch, _Pair
from fasttrain.config.resolve import resolve
from fasttrain.files import load
from fasttrain.hardware.machine_file import read_machine
from fasttrain.model.plan import Invocation, LaunchPlan, Target
from fasttrain.model.proof import Side, Took, Turn
from fasttrain.model.tuning import TUNING_FILE, TuningReport
from fasttrain.planning.process_settings import Candidate
from support.plans import MACHINES

NAME = "OMP_NUM_THREADS"
LIKE_ROUNDING, ANOTHER = 1e-7, 1e-2  # relative distances of losses


@dataclass
class Script:
    """A script that is only said to run.

    Attributes:
        present: Threads of a run without a setting.
        step_s: Returns the time of a step by the number of threads.
        apart: Relative distance of its losses with other than the present threads.
        ends_after: Its steps.
        ends_alone: Its steps with other than the present threads; None for as many.
        fails_with: The number of threads with which it fails after its first turn; 0 for any.
        own: Threads that it sets itself; 0 for none.
        keeping: Time of a step with an allocator that keeps memory, of one with glibc's.
        blind: Whether its losses aren't seen.
        two_ranks: Time of a step of two ranks, of one with all of the threads.
        draws: Whether ranks draw random numbers of their own.
    """

    present: int = 2
    step_s: Callable[[int], float] = lambda threads: 0.01 * threads
    apart: float = 0.0
    ends_after: int = 10**9
    ends_alone: int | None = None
    fails_with: int | None = None
    own: int = 0
    blind: bool = False
    keeping: float = 1.0
    two_ranks: float = 1.0
    draws: bool = False


class FakeSides:
    """Runs of such a script, in no time."""

    def __init__(
        self,
        script: Script,
        threads: dict[Side, int],
        keeping: set[Side],
        ranks: dict[Side, int],
        until_s: float,
    ) -> None:
        self.signum = 0
        self._keeping, self._ranks = keeping, ranks
        self._script, self._threads, self._until_s = script, threads, until_s
        self._taken = dict.fromkeys(threads, 0)
        self._codes: dict[Side, int] = {}

    def take(self, side: Side, turn: Turn) -> Took | None:
        """Take a turn."""
        threads, before = self._threads[side], self._taken[side]
        script = self._script
        if time.monotonic() >= self._until_s:
            return None
        if before and script.fails_with in (0, threads):
            self._codes[side] = 1
            return None
        most = script.ends_after
        if script.ends_alone is not None and threads != script.present:
            most = script.ends_alone
        steps = min(turn.steps, most - before)
        self._taken[side] += steps
        noise = 1e-5 if side.startswith("control") else 0.0
        usual = threads == script.present and self._ranks[side] == 1
        apart = noise if usual else script.apart * self._ranks[side]
        losses: tuple[float | None, ...] = tuple(
            (3.0 / (1 + step / 9)) * (1 + (apart * (-1) ** step if step >= 3 else apart))
            if not noise or step >= 3
            else 3.0 / (1 + step / 9)
            for step in range(before, before + steps)
        )
        losses = (None,) * steps if script.blind else losses
        step_s = script.step_s(script.own or threads)
        step_s *= script.keeping if side in self._keeping else 1.0
        if self._ranks[side] > 1:
            step_s = script.step_s(script.present) * script.two_ranks
        times = (step_s,) * max(0, steps - turn.untimed)
        return Took(
            self._taken[side], losses, times, times, sum(times), steps < turn.steps, steps,
            script.own or threads, draws=script.draws and self._ranks[side] > 1,
        )  # fmt: skip

    def end(self, *sides: Side) -> None:
        """End sides, which takes no time."""

    def exit_code(self, side: Side) -> int | None:
        return self._codes.get(side, 0)


def names_of(plan: LaunchPlan) -> set[str]:
    return {variable.name for variable in plan.environment}


class Search(SettingsSearch):
    """Compares in such runs."""

    script = Script()

    def follow(self, script: Script) -> SettingsSearch:
        self.script, self.labels = script, []
        self.strategies: dict[str, list[str]] = {}
        self.threads: dict[str, tuple[int, int]] = {}
        self.run()
        return self

    @contextmanager
    def _beside(
        self, candidate: Candidate, label: str, until_s: float, *, levers: bool
    ) -> Iterator[_Pair]:
        self.labels.append(label)
        sides: tuple[Side, ...] = ("plain", "chosen", "control-1", "control-2", "control-3")
        plans = {it: self._plan(candidate, it, label, 0, levers=levers) for it in sides}
        named = {
            it: [v.value for v in plan.environment if v.name == NAME] for it, plan in plans.items()
        }
        threads = {it: int(v[0] or 0) if v else self.script.present for it, v in named.items()}
        keeping = {it for it, plan in plans.items() if "GLIBC_TUNABLES" in names_of(plan)}
        ranks = {it: plan.processes.value.world_size for it, plan in plans.items()}
        self.threads[label] = (threads["plain"], threads["chosen"])
        self.strategies[label] = [plans[it].levers.strategy.value.mode for it in sides[:2]]
        made: Any = FakeSides(self.script, threads, keeping, ranks, until_s)
        yield _Pair(made, plans)
        self.signum = self.signum or made.signum


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: Any) -> Any:
    """Return a function that compares numbers of threads of a script."""
    monkeypatch.setattr(tuning_settings, "PAUSE_S", 0.0)

    def compare(
        script: Script, *counts: int, budget_s: float = 60.0, more: tuple[Candidate, ...] = ()
    ) -> Search:
        invocation = Invocation(
            target=Target("script", "train.py"), cwd=str(tmp_path), python="python3", shim="",
            agent="", environ={}, run_id="r1", run_dir=str(tmp_path), cache_dir=str(tmp_path),
            version="0.1.0",
        )  # fmt: skip
        settings = resolve({}, environ={}, cwd=Path("/")).settings
        machine = read_machine(MACHINES / "cpu-laptop.json")
        until_s = time.monotonic() + budget_s
        ground = Ground(settings, machine, invocation, until_s, quiet=True)
        candidates = [*(Candidate("threads", str(n), NAME, str(n)) for n in counts), *more]
        search = Search(ground, candidates, TuningReport("decided", 9, 1.0))
        search.follow(script)
        assert load(TuningReport, tmp_path / TUNING_FILE) == search.report
        return search

    return compare


def test_fewer_threads_are_kept_where_steps_are_faster(compare: Any) -> None:
    report = compare(Script(), 1, 2).report
    (one,) = report.settings
    assert (one.levers, one.asked, one.against, one.verdict) == (("threads",), "1", "2", "faster")
    assert one.variable == f"{NAME}=1"
    assert one.kept
    assert one.parity is not None
    assert one.parity.right
    assert one.ratio.low <= 0.5 <= one.ratio.high < 1
    assert (one.step_s, one.plain_step_s) == (0.01, 0.02)
    assert report.kept_settings.keys() == {NAME}
    assert report.steps == 9 + one.steps
    assert (report.end, report.comparing) == ("decided", ())


def test_the_faster_one_is_the_present_one_from_then_on(compare: Any) -> None:
    best = {4: 0.01, 1: 0.03, 16: 0.005, 8: 0.02}
    report = compare(Script(present=8, step_s=best.__getitem__), 4, 1, 16, 8).report
    found = [(one.asked, one.against, one.verdict) for one in report.settings]
    assert found == [("4", "8", "faster"), ("1", "4", "slower"), ("16", "4", "faster")]
    assert report.kept_settings[NAME].variable == f"{NAME}=16"


@pytest.mark.parametrize("threads", [(), (1, 2)])
def test_an_allocator_is_compared_on_top_of_the_threads(
    compare: Any, threads: tuple[int, ...]
) -> None:
    keeping = Candidate("allocator", "keeping memory", "GLIBC_TUNABLES", "a.b=1", "glibc's")
    report = compare(Script(keeping=0.8), *threads, more=(keeping,)).report
    found = report.settings[-1]
    assert (found.asked, found.against, found.verdict) == ("keeping memory", "glibc's", "faster")
    assert found.kept
    assert found.ratio.low <= 0.8 <= found.ratio.high < 1
    assert ("GLIBC_TUNABLES" in report.kept_settings, NAME in report.kept_settings) == (
        True,
        bool(threads),
    )
    slower = compare(Script(keeping=1.2), *threads, more=(keeping,)).report.settings[-1]
    assert (slower.verdict, slower.kept) == ("slower", False)


def test_the_present_number_has_no_line(compare: Any) -> None:
    search = compare(Script(present=1, step_s=lambda _: 0.01), 1, 2)
    assert [one.asked for one in search.report.settings] == ["2"]


def test_what_is_as_fast_or_slower_is_not_kept(compare: Any) -> None:
    same = compare(Script(step_s=lambda _: 0.01), 1).report.settings[0]
    slower = compare(Script(step_s=lambda threads: 0.02 / threads), 1).report.settings[0]
    assert (same.verdict, same.kept) == ("same", False)
    assert (slower.verdict, slower.kept) == ("slower", False)


def test_sums_in_another_order_are_right_and_another_training_is_not(compare: Any) -> None:
    search = compare(Script(apart=LIKE_ROUNDING), 1)
    (one,) = search.report.settings
    assert (one.verdict, one.kept, one.parity.right) == ("faster", True, True)
    assert [it for it in search.labels if it.endswith("losses")], "the bits alone don't tell"
    (one,) = compare(Script(apart=ANOTHER), 1).report.settings
    assert (one.verdict, one.kept, one.parity.right) == ("wrong", False, False)


def test_where_no_loss_is_seen_nothing_is_kept(compare: Any) -> None:
    (one,) = compare(Script(blind=True), 1).report.settings
    assert (one.verdict, one.kept, one.parity.right) == ("faster", False, None)
    assert "isn't known" in one.reason


def test_a_script_that_sets_its_threads_itself(compare: Any) -> None:
    search = compare(Script(own=3), 1, 2)
    (one,) = search.report.settings
    assert (one.verdict, one.kept) == ("no effect", False)
    assert "3 threads" in one.reason


def test_a_crash_with_one_value_only(compare: Any) -> None:
    (one,) = compare(Script(fails_with=1), 1).report.settings
    assert (one.verdict, one.kept) == ("wrong", False)
    assert "fails with it only" in one.reason
    (one,) = compare(Script(fails_with=0), 1).report.settings
    assert (one.verdict, one.kept) == ("undecided", False)
    assert "fails" in one.reason


def test_a_script_that_ends_earlier_with_one_value_trains_something_else(compare: Any) -> None:
    (one,) = compare(Script(ends_alone=20), 1).report.settings
    assert (one.verdict, one.kept) == ("wrong", False)
    assert "20 steps" in one.reason


def test_a_script_that_ends_early_is_started_again(compare: Any) -> None:
    search = compare(Script(ends_after=24), 1)
    (one,) = search.report.settings
    assert (one.verdict, one.kept) == ("faster", True)
    assert len(search.labels) > 1
    assert len(set(search.labels)) == len(search.labels), "each has a folder of its own"


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_a_script_of_few_steps_is_not_started_for_ever(compare: Any, steps: int) -> None:
    search = compare(Script(ends_after=steps), 1)
    (one,) = search.report.settings
    assert (one.verdict, one.pairs) == ("undecided", 0)
    assert f"{steps} steps" in one.reason or steps == 1
    assert len(search.labels) == tuning_settings.MOST_IN_VAIN


def test_a_budget_that_is_spent(compare: Any) -> None:
    report = compare(Script(), 4, 1, 2, budget_s=0.0).report
    assert {(one.verdict, one.kept) for one in report.settings} == {("undecided", False)}
    assert report.end == "budget"
    assert "budget" in report.settings[0].reason


def test_no_comparison_has_too_little_time_to_start(compare: Any, monkeypatch: Any) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(tuning_settings.time, "monotonic", lambda: next(ticks) * 0.5)
    monkeypatch.setattr(tuning_settings.PairedClocks, "verdict", lambda _: "undecided")
    found = compare(Script(), 4, 1, 16, 2, budget_s=40.0).report.settings
    assert found[0].pairs > 0
    assert [one.reason for one in found[2:]] == [tuning_settings._LATE] * len(found[2:])
    assert len(found) > 2


def test_time_for_the_losses_is_left_only_where_they_have_parted(
    compare: Any, monkeypatch: Any
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(tuning_settings.time, "monotonic", lambda: next(ticks) * 0.05)
    monkeypatch.setattr(tuning_settings.PairedClocks, "verdict", lambda _: "undecided")
    together = compare(Script(), 1).report.settings[0]
    parted = compare(Script(apart=LIKE_ROUNDING), 1).report.settings[0]
    assert 0 < parted.pairs < 0.8 * together.pairs


TWO_RANKS = Candidate("ranks", "2", "--nproc-per-node", "2", "one process")
ONE_WORKER = Candidate("loader workers", "1", "--loader-workers", "1", "no workers")


def test_ranks_that_are_faster_and_right_take_the_place_of_threads(compare: Any) -> None:
    search = compare(Script(apart=LIKE_ROUNDING, two_ranks=0.25), 1, 2, more=(TWO_RANKS,))
    threads, ranks = search.report.settings
    assert (ranks.asked, ranks.against) == ("2", "one process")
    assert (ranks.verdict, ranks.kept) == ("faster", True)
    assert ranks.variable == "--nproc-per-node=2"
    assert threads.verdict == "faster"
    assert (threads.kept, threads.reason) == (False, tuning_settings._SHARED)
    assert search.report.kept_settings.keys() == {"--nproc-per-node"}
    assert search.threads["ranks-2"] == (1, 8), "of sixteen cores each rank has half"
    # Their losses are compared without levers, but as one training run.
    assert search.strategies["ranks-2-losses"] == ["none", "ddp"]


@pytest.mark.parametrize(
    ("script", "verdict", "why"),
    [
        (Script(two_ranks=1.5), "slower", ""),
        (Script(two_ranks=0.5, apart=ANOTHER), "wrong", "something else"),
        (Script(two_ranks=0.5, apart=ANOTHER, draws=True), "faster", "draws random numbers"),
    ],
)
def test_ranks_that_are_slower_or_not_known_to_be_right_are_not_kept(
    compare: Any, script: Script, verdict: str, why: str
) -> None:
    threads, ranks = compare(script, 1, 2, more=(TWO_RANKS,)).report.settings
    assert (ranks.verdict, ranks.kept) == (verdict, False)
    assert why in ranks.reason
    assert threads.kept is (script.apart == 0.0)


def test_more_ranks_are_compared_with_those_that_were_kept(compare: Any) -> None:
    four = replace(TWO_RANKS, shown="4", value="4")
    found = compare(Script(two_ranks=0.5), 2, more=(TWO_RANKS, four)).report.settings
    told = [(one.asked, one.against, one.verdict, one.kept) for one in found]
    assert told == [("2", "one process", "faster", True), ("4", "2 ranks", "same", False)]


def test_a_worker_is_no_number_of_threads(compare: Any) -> None:
    search = compare(Script(), 1, 2, more=(ONE_WORKER, TWO_RANKS))
    assert [one.levers[0] for one in search.report.settings] == ["threads", *NAMES_OF_BOTH]


NAMES_OF_BOTH = ["loader workers", "ranks"]
