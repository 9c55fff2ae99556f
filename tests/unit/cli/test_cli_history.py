"""What a run leaves for later ones: its length, and times of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli import history as cli_history
from fasttrain.cli.history import find, learned, read, remember
from fasttrain.cli.tuned import holds_for, plan_run
from fasttrain.config.resolve import resolve
from fasttrain.hardware.machine_file import read_machine
from fasttrain.model.codec import dumps
from fasttrain.model.compile_auto import COMPILE_AUTO_FILE, HISTORY_FILE, Earlier, Switched
from fasttrain.model.outcome import Outcome, Receipt, State
from fasttrain.model.places import RUNS_FOLDER
from fasttrain.model.plan import Invocation, LaunchPlan, Target
from support.plans import MACHINES

MACHINE = read_machine(MACHINES / "cpu-laptop.json")
KEPT = Switched("kept", "faster", 40, 0.04, 0.03, 18.0, 0.5, 4.0, cached=True, cache="/c")


@pytest.fixture
def invocation(tmp_path: Path) -> Invocation:
    (tmp_path / "run").mkdir()
    return Invocation(
        target=Target("script", "train.py", ("--lr", "1")), cwd=str(tmp_path), python="python3",
        shim="", agent="", environ={}, run_id="r1", run_dir=str(tmp_path / "run"),
        cache_dir=str(tmp_path), version="0.1.0",
    )  # fmt: skip


def planned(invocation: Invocation, **flags: str) -> LaunchPlan:
    settings = resolve(flags, environ={}, cwd=Path("/"), preset=None).settings
    return plan_run(settings, MACHINE, invocation)


def ran(
    invocation: Invocation, receipt: Callable[..., Receipt], found: Switched | None = None,
    code: int = 0, **flags: str,
) -> None:  # fmt: skip
    plan = planned(invocation, **flags)
    if found:
        Path(plan.run_dir, COMPILE_AUTO_FILE).write_text(dumps(found))
    of = holds_for(plan, MACHINE, invocation)
    assert of is not None
    remember(replace(receipt(), exit_code=code), plan, of, invocation.cwd)


def test_without_a_folder_of_runs_nothing_is_kept(invocation: Invocation, receipt: Any) -> None:
    ran(invocation, receipt)
    assert read(invocation.cwd).runs == ()
    assert not Path(invocation.cwd, RUNS_FOLDER).exists()


def test_later_runs_know_length_and_times(invocation: Invocation, receipt: Any) -> None:
    def applied() -> Receipt:
        (rank,) = receipt().ranks
        compiled = Outcome("compile", "default", State.APPLIED)
        return replace(receipt(), ranks=(replace(rank, outcomes=(compiled,)),))

    Path(invocation.cwd, RUNS_FOLDER).mkdir()
    assert planned(invocation, compile="auto").earlier is None
    ran(invocation, receipt, compile="off")
    ran(invocation, receipt, compile="default")
    known = planned(invocation, compile="auto").earlier
    assert known is not None
    assert (known.steps, known.ratio) == (1200, None), "it was left to the script"
    ran(invocation, applied, compile="default")
    known = planned(invocation, compile="auto").earlier
    assert known is not None
    assert known.ratio == 1.0
    assert known.compile_s == 41.2
    assert planned(invocation, compile="auto", optimizer="keep").earlier == Earlier(
        known.date, 1200, levers=("none", "off", "keep", "keep", "model")
    )
    assert planned(invocation, compile="default").earlier is None, "nothing to decide"
    ran(invocation, receipt, KEPT, compile="auto")
    known = planned(invocation, compile="auto").earlier
    assert known is not None
    assert known.ratio == pytest.approx(0.75)
    assert (known.stall_s, known.background_s, known.dropped) == (4.0, 18.0, "")
    assert known.cache == "/c"
    ran(invocation, receipt, replace(KEPT, phase="dropped", reason="slower"), compile="auto")
    known = planned(invocation, compile="auto").earlier
    assert known is not None
    assert known.dropped == "slower"
    unsure = replace(KEPT, phase="dropped", reason="not faster", undecided=True)
    ran(invocation, receipt, unsure, compile="auto")
    known = planned(invocation, compile="auto").earlier
    assert known is not None
    assert known.dropped == "", "its ratio decides"
    other = replace(invocation, target=replace(invocation.target, args=("--lr", "2")))
    assert planned(other, compile="auto").earlier is None


@pytest.mark.parametrize(("code", "flags"), [(1, {}), (0, {"max_steps": "1200"})])
def test_a_run_that_was_cut_short_says_nothing_of_its_length(
    invocation: Invocation, receipt: Any, code: int, flags: dict[str, str]
) -> None:
    before = Earlier("", steps=7)
    plan = planned(invocation, **flags)
    assert learned(before, replace(receipt(), exit_code=code), plan, None).steps == 7
    assert learned(before, receipt(), planned(invocation), None).steps == 1200


def test_no_control_characters_of_a_history_are_shown(invocation: Invocation, receipt: Any) -> None:
    Path(invocation.cwd, RUNS_FOLDER).mkdir()
    dropped = replace(KEPT, phase="dropped", reason="slower\x1b[31m\nfasttrain: all is well")
    ran(invocation, receipt, dropped, compile="auto")
    known = planned(invocation, compile="auto").earlier
    assert known is not None
    assert known.dropped.isprintable()


def test_a_history_is_bounded_and_may_be_broken(
    invocation: Invocation, receipt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_history, "MOST_RUNS", 5)
    path = Path(invocation.cwd, RUNS_FOLDER, HISTORY_FILE)
    path.parent.mkdir()
    path.write_text("{")
    for number in range(7):
        one = replace(invocation, target=replace(invocation.target, args=(str(number),)))
        ran(one, receipt)
    history = read(invocation.cwd)
    assert len(history.runs) == 5
    last = history.runs[-1]
    assert find(history, last.of, planned(invocation)) == last.known
    other = planned(invocation, optimizer="keep")
    assert find(history, last.of, other) == Earlier(
        last.known.date, last.known.steps, levers=find(history, last.of, other).levers
    )
