"""Results of tuning that are kept: what is read back, and what a later run makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli.tuned import MOST_RESULTS, plan_run, read, save
from fasttrain.config.resolve import resolve
from fasttrain.hardware.machine_file import read_machine
from fasttrain.model.codec import dumps
from fasttrain.model.plan import Invocation, Target
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import (
    TUNED_FILE,
    UNBOUNDED,
    Compared,
    Ratio,
    TunedResults,
    TuningReport,
)
from fasttrain.planning.plan import make_plan
from support.plans import MACHINES

MACHINE = read_machine(MACHINES / "cpu-laptop.json")
KEPT = Compared(("compile",), "default", "faster", Ratio(0.5, 0.6, 0.7), kept=True)
SLOWER = Compared(("optimizer",), "fused", "slower", Ratio(1.1, 1.2, 1.3))
REPORT = TuningReport("decided", 9, 1.0, None, (KEPT, SLOWER))


def settings(**flags: str) -> Settings:
    return resolve(flags, environ={}, cwd=Path("/"), preset=flags.pop("preset", None)).settings


@pytest.fixture
def invocation(tmp_path: Path) -> Invocation:
    return Invocation(
        target=Target("script", "train.py", ("--lr", "1")), cwd=str(tmp_path), python="python3",
        shim="", agent="", environ={}, run_id="r1", run_dir=str(tmp_path / "run"),
        cache_dir=str(tmp_path), version="0.1.0",
    )  # fmt: skip


def kept(invocation: Invocation, report: TuningReport = REPORT) -> Path | None:
    plan = make_plan(settings(compile="default"), MACHINE, invocation)
    return save(report, plan, MACHINE, invocation)


def planned(invocation: Invocation, **flags: str) -> dict[str, str]:
    levers = plan_run(settings(**flags), MACHINE, invocation).levers
    return {"compile": levers.compile.value.mode, "optimizer": levers.optimizer.value}


def test_a_later_run_uses_a_result(invocation: Invocation) -> None:
    assert planned(invocation) == {"compile": "off", "optimizer": "fused"}
    assert kept(invocation) == Path(invocation.cwd, "fasttrain_runs", TUNED_FILE)
    assert planned(invocation) == {"compile": "default", "optimizer": "keep"}
    assert planned(invocation, optimizer="fused") == {"compile": "default", "optimizer": "fused"}
    assert planned(invocation, preset="exact") == {"compile": "off", "optimizer": "keep"}


def test_other_arguments_are_told(invocation: Invocation) -> None:
    kept(invocation)
    other = replace(invocation, target=replace(invocation.target, args=("--lr", "2")))
    plan = plan_run(settings(), MACHINE, other)
    assert plan.levers.compile.value.mode == "off"
    assert any("--lr 1 then, --lr 2 now" in hint for hint in plan.hints)


def test_a_script_that_has_changed_is_told(invocation: Invocation) -> None:
    script = Path(invocation.cwd, "train.py")
    script.write_text("one")
    kept(invocation)
    assert planned(invocation)["compile"] == "default"
    script.write_text("two")
    plan = plan_run(settings(), MACHINE, invocation)
    assert plan.levers.compile.value.mode == "off"
    assert any("source" in hint for hint in plan.hints)


def test_a_ratio_that_was_not_measured_is_not_claimed(invocation: Invocation) -> None:
    late = replace(KEPT, levers=("compile", "optimizer"), ratio=Ratio(0.0, 1.0, UNBOUNDED))
    kept(invocation, replace(REPORT, together=late))
    assert read(invocation.cwd)[0].results[0].ratio is None


def test_several_ranks_use_no_result_of_one(invocation: Invocation) -> None:
    kept(invocation)
    assert planned(invocation, nproc_per_node="2")["compile"] == "off"


def test_a_result_takes_the_place_of_an_earlier_one(invocation: Invocation) -> None:
    kept(invocation)
    kept(invocation, replace(REPORT, compared=(replace(KEPT, kept=False, verdict="slower"),)))
    (one,) = read(invocation.cwd)[0].results
    assert one.options == {"compile": "off"}
    assert one.ratio is None, "nothing is faster"


def test_secrets_of_the_command_line_are_not_kept(invocation: Invocation) -> None:
    args = ("--api-key", "hunter2-hunter2")
    path = kept(replace(invocation, target=replace(invocation.target, args=args)))
    assert path is not None
    assert "hunter2" not in path.read_text()


def test_what_says_nothing_is_not_kept(invocation: Invocation) -> None:
    undecided = replace(KEPT, kept=False, verdict="undecided")
    assert kept(invocation, replace(REPORT, compared=(undecided,))) is None


def test_only_the_latest_are_kept(invocation: Invocation) -> None:
    for at in range(MOST_RESULTS + 1):
        kept(replace(invocation, target=replace(invocation.target, args=(str(at),))))
    results = read(invocation.cwd)[0].results
    assert [results[0].of.args, results[-1].of.args] == [("1",), (str(MOST_RESULTS),)]


@pytest.mark.parametrize(
    "options",
    [{"compile": "evil"}, {"run_dir": "/"}, {"nonsense": "1"}, {"env": "LD_PRELOAD=x"}],
    ids=str,
)
def test_options_that_tune_does_not_set_are_not_read(
    invocation: Invocation, options: dict[str, Any]
) -> None:
    path = kept(invocation)
    assert path is not None
    good = read(invocation.cwd)[0].results
    bad = replace(good[0], options=options)
    path.write_text(dumps(TunedResults((*good, bad))))
    found, problem = read(invocation.cwd)
    assert found.results == good
    assert str(path) in problem


@pytest.mark.parametrize("text", ["", "{", "[]", '{"results": [1]}', '{"results": 7}'])
def test_a_file_that_is_none_is_passed_over(invocation: Invocation, text: str) -> None:
    path = kept(invocation)
    assert path is not None
    path.write_text(text)
    plan = plan_run(settings(), MACHINE, invocation)
    assert plan.levers.compile.value.mode == "off"
    assert any(str(path) in hint for hint in plan.hints), "and that is told"
