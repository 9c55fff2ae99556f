"""Results of tuning that are kept: what is read back, and what a later run makes of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli import running, tuned, tuning
from fasttrain.cli.tuned import holds_for, plan_run, read, results_path, save
from fasttrain.config.resolve import resolve
from fasttrain.hardware.machine_file import read_machine
from fasttrain.model.codec import dumps
from fasttrain.model.plan import Invocation, LaunchPlan, Target
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
    return saved(invocation, make_plan(settings(compile="default"), MACHINE, invocation), report)


def saved(invocation: Invocation, plan: LaunchPlan, report: TuningReport = REPORT) -> Path | None:
    of = holds_for(plan, MACHINE, invocation)
    assert of is not None
    return save(report, plan, of, MACHINE, invocation.cwd)


def planned(invocation: Invocation, **flags: str) -> dict[str, str]:
    levers = plan_run(settings(**flags), MACHINE, invocation).levers
    return {"compile": levers.compile.value.asked, "optimizer": levers.optimizer.value}


def test_a_later_run_uses_a_result(invocation: Invocation) -> None:
    assert planned(invocation) == {"compile": "auto", "optimizer": "fused"}
    assert kept(invocation) == Path(invocation.cwd, "fasttrain_runs", TUNED_FILE)
    assert planned(invocation) == {"compile": "default", "optimizer": "keep"}
    assert planned(invocation, optimizer="fused") == {"compile": "default", "optimizer": "fused"}
    assert planned(invocation, preset="exact") == {"compile": "off", "optimizer": "keep"}


OWN_RANKS = "import torch.distributed as dist\ndist.init_process_group()\n"


def test_tune_compares_no_ranks_for_a_script_that_makes_its_own(
    fasttrain_main: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "train.py").write_text(OWN_RANKS)
    seen: list[Invocation] = []

    def plan(_: Settings, __: Any, invocation: Invocation, **___: Any) -> Any:
        seen.append(invocation)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_process_settings", plan)
    fasttrain_main("tune", "train.py")
    (invocation,) = seen
    assert invocation.facts.handles_ranks


def test_a_run_that_may_be_tuned_knows_of_ranks_of_the_scripts_own(
    fasttrain_main: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "train.py").write_text(OWN_RANKS)
    seen: list[bool] = []

    def plan(_: Settings, __: Any, invocation: Invocation) -> Any:
        seen.append(bool(invocation.facts.handles_ranks))
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "plan_run", plan)
    for _ in range(2):
        fasttrain_main("run", "train.py")
        path = results_path(str(tmp_path))
        path.parent.mkdir(exist_ok=True)
        path.write_text(dumps(TunedResults()))
    assert seen == [False, True], "a source that decides nothing isn't read"


def test_a_result_decides_for_auto(invocation: Invocation) -> None:
    kept(invocation)
    plan = plan_run(settings(compile="auto"), MACHINE, invocation)
    assert plan.levers.compile.value.asked == "default"
    assert str(plan.levers.compile.source).startswith("tuned on ")
    slower = replace(KEPT, verdict="slower", kept=False)
    kept(invocation, replace(REPORT, compared=(slower,)))
    plan = plan_run(settings(compile="auto"), MACHINE, invocation)
    assert plan.levers.compile.value.mode == "off"


def test_other_arguments_are_told(invocation: Invocation) -> None:
    kept(invocation)
    other = replace(invocation, target=replace(invocation.target, args=("--lr", "2")))
    plan = plan_run(settings(), MACHINE, other)
    assert plan.levers.compile.value.asked == "auto"
    assert any("--lr 1 then, --lr 2 now" in hint for hint in plan.hints)


def test_a_script_that_has_changed_is_told(invocation: Invocation) -> None:
    script = Path(invocation.cwd, "train.py")
    script.write_text("one")
    kept(invocation)
    assert planned(invocation)["compile"] == "default"
    script.write_text("two")
    plan = plan_run(settings(), MACHINE, invocation)
    assert plan.levers.compile.value.asked == "auto"
    assert any("file has changed" in hint for hint in plan.hints)


def test_a_ratio_that_was_not_measured_is_not_claimed(invocation: Invocation) -> None:
    late = replace(KEPT, levers=("compile", "optimizer"), ratio=Ratio(0.0, 1.0, UNBOUNDED))
    kept(invocation, replace(REPORT, together=late))
    assert read(invocation.cwd)[0].results[0].ratio is None


@pytest.mark.parametrize(
    ("tuned", "run", "told"),
    [
        ({}, {"nproc_per_node": "2"}, "processes 1 then, 2 now"),
        ({"nproc_per_node": "2"}, {}, "processes 2 then, 1 now"),
        ({"nproc_per_node": "2"}, {"nproc_per_node": "3"}, "processes 2 then, 3 now"),
        (
            {"nproc_per_node": "2"},
            {"nproc_per_node": "2", "batch": "per-rank"},
            "strategy ddp, batch split then, ddp, batch per-rank now",
        ),
        ({"nproc_per_node": "2"}, {"nproc_per_node": "2", "strategy": "none"}, "none now"),
    ],
)
def test_another_number_of_processes_uses_no_result(
    invocation: Invocation, tuned: dict[str, str], run: dict[str, str], told: str
) -> None:
    plan = make_plan(settings(compile="default", **tuned), MACHINE, invocation)
    saved(invocation, plan)
    assert planned(invocation, **tuned) == {"compile": "default", "optimizer": "keep"}
    other = plan_run(settings(**run), MACHINE, invocation)
    assert str(other.levers.compile.source) == "default"
    assert any(told in hint for hint in other.hints)


def test_several_nodes_use_no_result(invocation: Invocation) -> None:
    kept(invocation)
    nodes = {"nodes": "2", "node_rank": "0", "master_addr": "localhost"}
    assert planned(invocation, **nodes)["compile"] == "off"


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


def test_only_the_latest_are_kept(invocation: Invocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "MOST_RESULTS", 5)
    for at in range(6):
        kept(replace(invocation, target=replace(invocation.target, args=(str(at),))))
    results = read(invocation.cwd)[0].results
    assert [results[0].of.args, results[-1].of.args] == [("1",), ("5",)]


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


@pytest.mark.parametrize(
    "changes",
    [
        {"date": "\x1b[31mtoday"},
        {"date": ""},
        {"ratio": Ratio(-5.0, -1.0, 0.5)},
        {"ratio": Ratio(0.9, 0.8, 0.7)},
        {"ratio": Ratio(0.5, 0.6, 1e300)},
    ],
    ids=str,
)
def test_what_tune_does_not_write_is_not_quoted(
    invocation: Invocation, changes: dict[str, Any]
) -> None:
    path = kept(invocation)
    assert path is not None
    (good,) = read(invocation.cwd)[0].results
    path.write_text(dumps(TunedResults((replace(good, **changes),))))
    found, problem = read(invocation.cwd)
    assert (found.results, str(path) in problem) == ((), True)


def test_no_control_characters_of_a_file_reach_the_terminal(invocation: Invocation) -> None:
    path = kept(invocation)
    assert path is not None
    (good,) = read(invocation.cwd)[0].results
    for of in (replace(good.of, torch="\x1b]0;title\x07"), replace(good.of, args=("\x1b[2J",))):
        path.write_text(dumps(TunedResults((replace(good, of=of),))))
        (hint,) = (one for one in plan_run(settings(), MACHINE, invocation).hints if "then" in one)
        assert hint.isprintable()


def test_a_huge_file_is_not_read(invocation: Invocation) -> None:
    path = kept(invocation)
    assert path is not None
    os.truncate(path, 1 << 40)  # without blocks on the disk
    assert "too large" in read(invocation.cwd)[1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"results": [1]}', '{"results": 7}'])
def test_a_file_that_is_none_is_passed_over(invocation: Invocation, text: str) -> None:
    path = kept(invocation)
    assert path is not None
    path.write_text(text)
    plan = plan_run(settings(), MACHINE, invocation)
    assert plan.levers.compile.value.asked == "auto"
    assert any(str(path) in hint for hint in plan.hints), "and that is told"


THREADS = Compared(("threads",), "1", "faster", Ratio(0.80, 0.82, 0.85), kept=True, against="2",
                   variable="OMP_NUM_THREADS=1")  # fmt: skip


def threads(invocation: Invocation, **flags: str) -> str | None:
    plan = plan_run(settings(**flags), MACHINE, invocation)
    return next((v.value for v in plan.environment if v.name == "OMP_NUM_THREADS"), None)


def test_a_later_run_has_the_threads_that_were_kept(invocation: Invocation) -> None:
    assert threads(invocation) is None
    assert kept(invocation, TuningReport("decided", 9, 1.0, settings=(THREADS,)))
    assert threads(invocation) == "1"
    assert planned(invocation) == {"compile": "auto", "optimizer": "fused"}, "no lever was decided"
    own = replace(invocation, environ={"OMP_NUM_THREADS": "7"})
    assert threads(own) is None, "it stays as it is"
    (hint,) = plan_run(settings(), MACHINE, own).hints
    assert "isn't used: you have set OMP_NUM_THREADS=7" in hint


def test_a_later_result_without_threads_replaces_one_with(invocation: Invocation) -> None:
    kept(invocation, replace(REPORT, settings=(THREADS,)))
    assert threads(invocation) == "1"
    kept(invocation)
    assert threads(invocation) is None


def test_threads_of_another_number_of_cores_are_told(invocation: Invocation) -> None:
    kept(invocation, TuningReport("decided", 9, 1.0, settings=(THREADS,)))
    fewer = replace(MACHINE, cpu=replace(MACHINE.cpu, cores=MACHINE.cpu.cores - 1))
    plan = plan_run(settings(), fewer, invocation)
    assert not [v for v in plan.environment if v.name == "OMP_NUM_THREADS"]
    (hint,) = plan.hints
    assert "OMP_NUM_THREADS=1" in hint
    assert "isn't used" in hint


def test_a_variable_that_tune_does_not_set_is_not_read_back(invocation: Invocation) -> None:
    path = kept(invocation, TuningReport("decided", 9, 1.0, settings=(THREADS,)))
    assert path is not None
    path.write_text(path.read_text().replace("OMP_NUM_THREADS", "LD_PRELOAD"))
    plan = plan_run(settings(), MACHINE, invocation)
    assert not [v for v in plan.environment if v.name == "LD_PRELOAD"]
    assert str(path) in " ".join(plan.hints)
