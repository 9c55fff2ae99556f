"""Ranks that tune together: they switch at the same steps, agree on results, and never hang."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.files import load
from fasttrain.model.outcome import State
from fasttrain.model.tuning import TUNING_FILE, Parity, Tuning, TuningReport
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.tune import ranks as ranks_module
from fasttrain.shim.tune.ranks import Together
from fasttrain.shim.tune.tuner import Tuner
from support.fake_levers import FakeLever
from support.forked_ranks import Ended, on_ranks

STEP_S = 0.01
LEVERS = ("a", "b", "c")
RIGHT = Parity(True, "equal", 0.1, 1.0)


class FakeRepeats:
    """Finds what it is told to."""

    def __init__(self, found: Parity) -> None:
        self._found = found

    @contextmanager
    def of_calls(self, rounds: float, *, eager: bool) -> Iterator[Any]:
        yield lambda plain, changed: self._found


class Loop:
    """The training loop of one rank, on a clock that is neither the other ranks' nor steady."""

    def __init__(self, ranks: Ranks, folder: Path, **options: Any) -> None:
        self.now_s = 100.0 * ranks.rank
        if not options.get("real_time"):  # this is a process of its own
            for clock in ("perf_counter", "process_time"):
                setattr(time, clock, lambda: self.now_s)
        self._random = random.Random(ranks.rank)
        self._skew = 1.0 + 0.3 * ranks.rank
        self.meter: Any = SimpleNamespace(steps=0, device="")
        states = options.get("states", {})
        self.levers = {
            name: FakeLever(name, states.get(name, State.APPLIED), "nothing to do")
            for name in options.get("levers", LEVERS)
        }
        self.tuner = Tuner(
            Tuning(options.get("budget_s", 25.0), "", (), seed=5),
            self.levers,
            dict.fromkeys(self.levers, 0.1),
            self.meter,
            FakeRepeats(options.get("parity", RIGHT)),  # type: ignore[arg-type]
            folder,
            Together(ranks, self.meter, time.perf_counter() - ranks.rank),  # started before
        )

    def step(self) -> str:
        """Make a step, and return what was on in it."""
        on = "".join(name for name, lever in self.levers.items() if lever.on)
        step_s = STEP_S * self._skew * (0.7 if "a" in on else 1) * (1.5 if "b" in on else 1)
        self.now_s += step_s * (1 + 0.1 * self._random.expovariate(1))
        self.meter.steps += 1
        self.tuner.after_step()
        return on

    def run(self, most: int = 10**9) -> list[str]:
        """Return what was on in each step."""
        seen: list[str] = []
        while not self.tuner.done and len(seen) < most:
            seen.append(self.step())
        self.tuner.finish()
        return seen


def reports(folder: Path) -> TuningReport:
    return load(TuningReport, folder / TUNING_FILE)


def test_all_ranks_switch_at_the_same_steps(tmp_path: Path) -> None:
    first, second, third = on_ranks(
        tmp_path, lambda ranks: Loop(ranks, tmp_path).run(), world_size=3
    )
    assert first.good == second.good == third.good
    assert {"", "a", "ab", "ac"} <= set(first.good), "each was tried on top of what was kept"
    report = reports(tmp_path)
    assert report.steps == len(first.good)
    verdicts = {one.levers[0]: one.verdict for one in report.compared}
    assert verdicts["a"] == "faster"
    assert verdicts["b"] == "slower"
    assert report.noise is not None
    assert report.noise.plain_step_s >= 1.6 * STEP_S, "the slowest rank has a skew of 1.6"


def test_a_budget_ends_all_ranks_at_one_step(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> list[str]:
        return Loop(ranks, tmp_path, budget_s=5.0).run()

    first, second = on_ranks(tmp_path, run)
    assert first.good == second.good
    assert reports(tmp_path).end == "budget"


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Parity(False, "too far", 9.0, 1.0), "wrong"),
        (Parity(None, "it can't be repeated"), "faster"),
    ],
)
def test_the_worst_rank_decides(tmp_path: Path, found: Parity, verdict: str) -> None:
    def run(ranks: Ranks) -> list[str]:
        parity = found if ranks.rank == 1 else RIGHT
        return Loop(ranks, tmp_path, levers=["a"], parity=parity).run()

    first, second = on_ranks(tmp_path, run)
    assert first.good == second.good
    (one,) = reports(tmp_path).compared
    assert (one.verdict, one.kept) == (verdict, False)
    assert one.parity is not None
    assert one.parity.reason == f"on rank 1: {found.reason}"


def test_a_lever_that_one_rank_can_not_use_has_no_effect(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> list[str]:
        states = {"a": State.ARMED} if ranks.rank == 1 else {}
        return Loop(ranks, tmp_path, levers=["a"], states=states).run()

    first, second = on_ranks(tmp_path, run)
    assert first.good == second.good
    (one,) = reports(tmp_path).compared
    assert (one.verdict, one.reason) == ("no effect", "on rank 1: nothing to do")


def ends_by_refusal(ended: Ended, *words: str) -> None:
    assert ended.code == 78, ended.stderr
    assert "[tune-ranks]" in ended.stderr
    for word in words:
        assert word in ended.stderr


def test_a_rank_that_ends_early_leaves_none_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_S", 0.5)

    def run(ranks: Ranks) -> int:
        loop = Loop(ranks, tmp_path, real_time=True)
        return len(loop.run(40 if ranks.rank == 1 else 10**9))

    first, second = on_ranks(tmp_path, run)
    assert second.good == 40
    ends_by_refusal(first, "rank 1 ended after 40 steps")


def test_ranks_at_other_steps_end(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> list[str]:
        loop = Loop(ranks, tmp_path)
        if ranks.rank == 1:
            loop.meter.steps += 3  # as where a rank skips a step
        return loop.run()

    for ended in on_ranks(tmp_path, run):
        ends_by_refusal(ended, "rank 0", "rank 1 after 4 steps")


def test_ranks_with_other_levers_end(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> list[str]:
        return Loop(ranks, tmp_path, levers=LEVERS[: 2 + ranks.rank]).run()

    for ended in on_ranks(tmp_path, run):
        ends_by_refusal(ended, "compare a, b,", "compare a, b, c")
