from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.node_run import Ended
from fasttrain.launch.receipts import (
    NO_TORCH,
    gather,
    in_children,
    read_hang,
    read_receipt,
    trains_in_children,
    unmet,
    was_preempted,
)
from fasttrain.model.codec import dumps
from fasttrain.model.decision import Decision, Source, SourceKind
from fasttrain.model.errors import ExitCode
from fasttrain.model.hang import Hang
from fasttrain.model.outcome import PREEMPTED, State, StepStats
from fasttrain.model.plan import LaunchPlan, Target


def test_reports_of_all_ranks_in_order(plan: LaunchPlan, report: Any) -> None:
    reports = [report(rank, State.APPLIED) for rank in (10, 2, 0)]
    receipt = gather(plan, Ended(3, 1.5))
    assert receipt.ranks == tuple(reversed(reports))
    assert (receipt.exit_code, receipt.wall_s, receipt.run_id) == (3, 1.5, "r1")
    assert read_receipt(Path(plan.run_dir)) == receipt


def test_children_of_a_worker_that_has_not_imported_torch(plan: LaunchPlan, report: Any) -> None:
    child = report(0, State.APPLIED)
    run_dir = Path(plan.run_dir)
    (run_dir / "rank-0.json").rename(run_dir / "rank-0.child-7.json")
    (rank,) = gather(plan, Ended(0, 1.5)).ranks
    assert (rank.rank, rank.stats.steps) == (0, child.stats.steps)
    assert rank.outcomes[0].state is State.APPLIED
    assert rank.outcomes[0].notes[-1] == in_children(1)


def test_a_run_that_has_not_imported_torch(plan: LaunchPlan, of_command: Any) -> None:
    def named(kind: SourceKind, **changes: Any) -> Any:
        fused = Decision("fused", "", Source(kind, "--optimizer"))
        levers = replace(plan.levers, optimizer=fused)
        return gather(replace(plan, levers=levers, **changes), Ended(0, 1.0))

    Path(plan.run_dir).mkdir(parents=True)
    by_flag = named(SourceKind.FLAG)
    assert [line.split()[:2] for line in by_flag.unmet] == [["optimizer", "fused"]]
    assert NO_TORCH in by_flag.hints
    by_default = named(SourceKind.MACHINE)
    assert (by_default.unmet, NO_TORCH in by_default.hints) == ((), True)
    assert len(named(SourceKind.MACHINE, strict=True).unmet) == 1, "as an error"
    command = gather(of_command("./train"), Ended(0, 1.0))
    assert (command.unmet, NO_TORCH in command.hints) == ((), False)
    assert NO_TORCH not in gather(plan, Ended(1, 1.0)).hints, "it failed before"


def test_a_rank_that_was_ended_has_the_steps_that_were_seen(plan: LaunchPlan, report: Any) -> None:
    cut, whole, unseen = (report(rank, State.APPLIED) for rank in range(3))  # 3 steps each
    for one in (cut, unseen):
        (Path(plan.run_dir) / f"rank-{one.rank}.json").write_text(
            dumps(replace(one, finished=False))
        )
    seen = {cut.rank: 195, whole.rank: 4, unseen.rank: 2}
    receipt = gather(plan, Ended(143, 1.5, steps=seen))
    assert [rank.stats.steps for rank in receipt.ranks] == [195, 3, 3]
    assert [rank.stats.reported_until for rank in receipt.ranks] == [3, 0, 0]
    assert read_receipt(Path(plan.run_dir)) == receipt


@pytest.mark.parametrize(
    ("own", "childs", "elsewhere"),
    [(0, 4, True), (1, 4, False), (0, 0, False), (1, None, False), (0, None, False)],
)
def test_a_script_that_trains_only_in_processes_that_it_starts(
    plan: LaunchPlan, report: Any, own: int, childs: int | None, elsewhere: bool
) -> None:
    one, run_dir = report(0), Path(plan.run_dir)
    for name, steps in (("rank-0.json", own), ("rank-0.child-77.json", childs)):
        if steps is not None:
            made = replace(one, stats=replace(one.stats, steps=steps))
            Path(run_dir, name).write_text(dumps(made))
    Path(run_dir, "rank-0.child-78.json").write_text("half of a")
    passes = replace(one, stats=replace(one.stats, steps=9, are_passes=True))
    Path(run_dir, "rank-0.child-79.json").write_text(dumps(passes))
    assert trains_in_children(run_dir) is elsewhere


def test_command_can_be_pasted(plan: LaunchPlan, report: Any) -> None:
    report(0)
    target = Target("script", "my train.py", ("it's", "$HOME"))
    assert gather(replace(plan, target=target), Ended(0, 0.0)).command == (
        "'my train.py' 'it'\"'\"'s' '$HOME'"
    )


def test_a_report_that_cannot_be_read_is_a_warning(plan: LaunchPlan, report: Any) -> None:
    kept = report(1)
    (Path(plan.run_dir) / "rank-0.json").write_text('{"rank": 0')
    receipt = gather(replace(plan, warnings=("of the plan",)), Ended(0, 0.0))
    assert receipt.ranks == (kept,)
    assert receipt.warnings[0] == "of the plan"
    assert receipt.warnings[1].startswith("rank-0.json ")


def test_a_receipt_that_cannot_be_written_is_told_at_least(plan: LaunchPlan, report: Any) -> None:
    report(0, State.APPLIED)
    Path(plan.run_dir, "receipt.json.tmp").mkdir(parents=True)
    (told,) = gather(plan, Ended(0, 0.0)).warnings
    assert told.startswith("receipt.json ")
    assert told.endswith(": Is a directory")


def test_warnings_of_the_ranks_are_told_once(plan: LaunchPlan, report: Any) -> None:
    for rank, warnings in ((0, ("nan",)), (1, ("nan", "other")), (2, ())):
        left = replace(report(rank, State.APPLIED), warnings=warnings)
        (Path(plan.run_dir) / f"rank-{rank}.json").write_text(dumps(left))
    assert gather(plan, Ended(0, 0.0)).warnings == ("ranks 0-1: nan", "rank 1: other")


def test_a_run_that_was_preempted(plan: LaunchPlan, report: Any) -> None:
    run_dir = Path(plan.run_dir)
    made = report(0, State.APPLIED)
    assert not was_preempted(run_dir)
    outcome = replace(made.outcomes[0], lever="preempt", counts={"snapshots": 2, PREEMPTED: 1})
    (run_dir / "rank-0.json").write_text(dumps(replace(made, outcomes=(outcome,))))
    assert was_preempted(run_dir)
    early = gather(plan, Ended(ExitCode.PREEMPTED, 0.0))
    assert "--run-dir" in early.hints[-1]
    assert "--resume" not in early.hints[-1]
    (run_dir / "snapshots/step-000000003").mkdir(parents=True)
    receipt = gather(plan, Ended(ExitCode.PREEMPTED, 0.0))
    assert receipt.exit_code == 85
    assert f" --resume {run_dir} " in receipt.hints[-1]
    assert "--resume" not in str(gather(plan, Ended(0, 0.0)).hints)


def test_a_hang_of_an_earlier_run(tmp_path: Path, slug: Any) -> None:
    assert read_hang(tmp_path) is None
    hang = Hang("r1", 3.0, 2.0, "stop", ("rank 0 is at x",), ())
    (tmp_path / "hang.json").write_text(dumps(hang))
    assert read_hang(tmp_path) == hang
    (tmp_path / "hang.json").write_text("{")
    assert slug(read_hang, tmp_path) == ("receipt", 69)


@pytest.mark.parametrize(
    ("state", "by_default", "by_name"),
    [
        (State.APPLIED, False, False),
        (State.OFF, False, False),
        (State.CEDED, False, False),
        (State.SKIPPED, False, True),
        (State.ARMED, True, True),
        (State.FAILED, True, True),
    ],
)
def test_what_counts_as_unmet(report: Any, state: State, by_default: bool, by_name: bool) -> None:
    assert bool(unmet((report(0, state),))) is by_default
    assert bool(unmet((report(0, state, explicit=True),))) is by_name


def test_unmet_names_rank_lever_and_reason(plan: LaunchPlan, report: Any) -> None:
    report(0, State.APPLIED)
    report(1, State.FAILED)
    (line,) = gather(plan, Ended(0, 0.0)).unmet
    assert [word in line for word in ("rank 1", "amp bfloat16", "because of 1")] == [True] * 3


def test_what_holds_of_several_ranks_is_told_once(report: Any) -> None:
    told = unmet(tuple(replace(report(0, State.ARMED), rank=rank) for rank in range(8)))
    (line,) = told
    assert line.startswith("ranks 0-7: amp bfloat16 ")
    assert line.endswith(": because of 0")


def test_a_script_that_trains_nothing_has_no_warnings_of_defaults(report: Any) -> None:
    def idle(*states: State, **how: bool) -> Any:
        return replace(report(0, *states, **how), device="", stats=StepStats())

    assert unmet((idle(State.ARMED),)) == []
    assert unmet((idle(State.ARMED), report(1))), "another rank trains"
    assert unmet((idle(State.FAILED),)), "it is broken, whatever the script does"
    assert unmet((idle(State.ARMED, explicit=True),)), "somebody has asked for it"
    assert unmet((idle(State.ARMED),), strict=True), "as an error"


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b'{"run_id": 3}'])
def test_a_receipt_that_cannot_be_read(tmp_path: Path, slug: Any, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "receipt.json").write_bytes(content)
    assert slug(read_receipt, tmp_path) == ("receipt", 69)
