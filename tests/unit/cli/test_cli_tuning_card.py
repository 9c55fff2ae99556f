"""What ``fasttrain tune`` prints of a result, and the budget that it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli.beside import scratch_made
from fasttrain.cli.cards.tuning import print_tuning
from fasttrain.cli.tuning import (
    NOT_READY,
    _Budget,
    _latest,
    _settings_s,
    read_budget,
    with_all_levers,
)
from fasttrain.model.errors import FasttrainError
from fasttrain.model.places import scratch_folder
from fasttrain.model.tuning import UNBOUNDED, Compared, Parity, Ratio, TuningReport
from fasttrain.planning.process_settings import Candidate, ProcessSettings
from fasttrain.planning.tuning import TuningPlan
from support.plans import plan_for

NOTHING = Ratio(0.0, 1.0, UNBOUNDED)
RIGHT = Parity(True, "output is 1.2e-07 from fp64")
FASTER = Compared(
    ("compile",), "default", "faster", Ratio(0.61, 0.62, 0.64), 0.029, 0.047, 30, 400, 38.5, RIGHT,
    kept=True,
)  # fmt: skip
SLOWER = Compared(("amp",), "bfloat16", "slower", Ratio(1.9, 2.0, 2.1), 0.1, 0.05, 9, 90,
                  reason="steps are slower with it")  # fmt: skip
UNKNOWN = Compared(("optimizer",), "fused", "undecided", NOTHING, reason="the times scatter")


@pytest.fixture
def tuned() -> TuningPlan:
    plan = plan_for("8xh100", compile="default")
    return TuningPlan(plan, ("amp", "compile", "optimizer"), {"matmul": "amp is off"})


def printed(report: TuningReport, tuned: TuningPlan, capsys: Any) -> str:
    print_tuning(report, tuned, "/runs/r1")
    out: str = capsys.readouterr().out
    return out


def command(out: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if "fasttrain run" in line]
    return line.partition("fasttrain run ")[2].split()


def test_the_command_has_what_was_kept_and_not_what_was_undecided(
    tuned: TuningPlan, capsys: Any
) -> None:
    report = TuningReport("budget", 500, 60.0, None, (SLOWER, FASTER, UNKNOWN))
    out = printed(report, tuned, capsys)
    assert command(out) == ["train.py", "--amp", "off", "--compile", "default"]
    assert "0.620 (0.610 to 0.640)" in out
    assert "matmul" in out
    assert str(UNBOUNDED) not in out


def test_a_verdict_of_the_processors_time_is_said_to_be_one(tuned: TuningPlan, capsys: Any) -> None:
    assert "processor" not in printed(
        TuningReport("decided", 9, 9.0, None, (FASTER,)), tuned, capsys
    )
    unsure = replace(FASTER, ratio=Ratio(0.9, 0.98, 1.07))
    out = printed(TuningReport("decided", 9, 9.0, None, (unsure,)), tuned, capsys)
    assert "processor" in out
    assert command(out) == ["train.py", "--compile", "default"], "it is kept"


def test_no_longer_budget_is_advised_where_only_children_train(
    tuned: TuningPlan, capsys: Any
) -> None:
    out = printed(TuningReport("children", 0, 9.0), tuned, capsys)
    assert "it starts" in out
    assert "--budget" not in out


class OnlyChildren:
    """A script of which only children train."""

    def train_alone(self) -> bool:
        return True


def test_a_run_in_which_only_children_train_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr("fasttrain.cli.tuning.os.kill", lambda _, signum: sent.append(signum))
    budget = _Budget(1000.0, OnlyChildren())  # type: ignore[arg-type]
    budget.tick()
    budget.tick()
    assert len(sent) == 1
    assert budget.over


def test_a_lever_whose_turn_did_not_come_has_a_line(tuned: TuningPlan, capsys: Any) -> None:
    ended = TuningReport("budget", 138, 27.0, comparing=("compile",), compared=(SLOWER,))
    report = with_all_levers(ended, tuned)
    assert [one.levers[0] for one in report.compared] == ["amp", "compile", "optimizer"]
    assert report.compared[0] == SLOWER
    out = printed(report, tuned, capsys)
    assert f"compile default: {NOT_READY}" in out
    assert "optimizer fused: its turn" in out
    assert command(out) == ["train.py", "--amp", "off"]
    nothing = TuningReport("script", 3, 1.0)
    assert with_all_levers(nothing, tuned) == nothing


def test_a_script_that_failed_promises_nothing_to_later_runs(
    tuned: TuningPlan, capsys: Any
) -> None:
    report = TuningReport("script", 500, 60.0, None, (FASTER,))
    print_tuning(report, tuned, "/runs/r1", 3)
    out = capsys.readouterr().out
    assert "don't use this" in out
    assert command(out) == ["train.py", "--compile", "default"]
    assert "don't" not in printed(report, tuned, capsys)


def test_what_was_compared_last_is_told_before_the_advice(tuned: TuningPlan, capsys: Any) -> None:
    report = TuningReport("budget", 500, 3600.0, None, (FASTER,), comparing=("optimizer",))
    out = printed(report, tuned, capsys)
    assert "while it compared optimizer: a longer --budget" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": "0,1"}, ["--nproc-per-node", "2"]),
        (
            {"nproc_per_node": "4", "strategy": "ddp", "batch": "per-rank"},
            ["--nproc-per-node", "4", "--strategy", "ddp", "--batch", "per-rank"],
        ),
    ],
)
def test_the_command_makes_the_same_ranks(
    tuned: TuningPlan, capsys: Any, options: dict[str, str], words: list[str]
) -> None:
    tuned = replace(tuned, plan=plan_for("8xh100", compile="default", **options))
    out = printed(TuningReport("decided", 9, 1.0, None, (FASTER,)), tuned, capsys)
    assert command(out) == ["train.py", *words, "--compile", "default"]


def test_arguments_of_the_script_are_in_the_command(tuned: TuningPlan, capsys: Any) -> None:
    target = replace(tuned.plan.target, kind="module", name="pkg.train", args=("--lr", "a b"))
    tuned = replace(tuned, plan=replace(tuned.plan, target=target))
    out = printed(TuningReport("decided", 9, 1.0, None, (FASTER,)), tuned, capsys)
    assert command(out) == ["-m", "pkg.train", "--compile", "default", "--", "--lr", "'a", "b'"]


def test_wrong_results_are_shown_with_their_numbers(tuned: TuningPlan, capsys: Any) -> None:
    wrong = replace(FASTER, verdict="wrong", kept=False, parity=Parity(False, "0.01 of 0.0002"),
                    reason="its results are wrong: 0.01 of 0.0002")  # fmt: skip
    out = printed(TuningReport("decided", 9, 1.0, None, (wrong,)), tuned, capsys)
    assert command(out) == ["train.py", "--compile", "off"]
    assert "0.01 of 0.0002" in out


@pytest.mark.parametrize("one", [SLOWER, UNKNOWN], ids=["slower", "undecided"])
def test_settings_of_which_none_is_kept_are_told_to_change_nothing(
    tuned: TuningPlan, capsys: Any, one: Compared
) -> None:
    report = TuningReport("budget", 9, 60.0, settings=(replace(one, levers=("ranks",)),))
    assert "later runs have the defaults" in printed(report, tuned, capsys)


def test_what_decides_nothing_promises_nothing(tuned: TuningPlan, capsys: Any) -> None:
    unsure = replace(UNKNOWN, pairs=9, ratio=Ratio(0.9, 1.0, 1.1))
    out = printed(TuningReport("budget", 90, 60.0, None, (unsure,)), tuned, capsys)
    assert "0.900 to 1.100" in out
    assert "fasttrain run" not in out


@pytest.mark.parametrize("steps", [0, 3])
def test_without_a_result_there_is_nothing_to_type(
    tuned: TuningPlan, capsys: Any, steps: int
) -> None:
    out = printed(TuningReport("script", steps, 1.0), tuned, capsys)
    assert "fasttrain run" not in out
    assert "nothing was compared" in out


def test_a_budget_that_a_compilation_took_is_told_with_the_lever(
    tuned: TuningPlan, capsys: Any
) -> None:
    out = printed(TuningReport("budget", 35, 240.0, comparing=("compile",)), tuned, capsys)
    (line,) = [line for line in out.splitlines() if "nothing was compared" in line]
    assert "compile" in line
    assert "--budget" in line


def test_a_budget_that_was_spent_before_the_first_step_is_too_short(
    tuned: TuningPlan, capsys: Any
) -> None:
    assert "--budget" in printed(TuningReport("budget", 0, 20.0), tuned, capsys)
    assert "--budget" not in printed(TuningReport("script", 0, 20.0), tuned, capsys)


def test_a_script_that_is_interrupted_is_told_with_its_exit_code(
    tuned: TuningPlan, capsys: Any
) -> None:
    print_tuning(TuningReport("script", 30, 9.0), tuned, "/runs/r1", 130)
    assert "130" in capsys.readouterr().out


def test_a_start_in_which_nothing_was_timed_hides_no_later_one() -> None:
    in_vain = TuningReport("script", 50, 9.0, starts=2)
    later = TuningReport("budget", 45, 8.0, None, (FASTER,), starts=2)
    assert _latest(in_vain, later) == later
    assert _latest(later, TuningReport("running", 0, 0.0)) == later, "it never came to train"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("45", 45), ("10s", 10)]
)
def test_a_budget_in_seconds(text: str, seconds: float) -> None:
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "9s", "0", "-5m", "5 m", "1e9", "٣٠s", "1d", "99999999s"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        read_budget(text)
    assert (caught.value.slug, caught.value.exit_code) == ("tune-budget", 2)


@pytest.mark.parametrize("run_id", ["", "../../home/me", "a/b"])
def test_a_scratch_folder_is_in_its_place_only(run_id: str) -> None:
    with pytest.raises(ValueError, match="no name of a run"):
        scratch_folder(run_id)


def test_no_place_for_a_scratch_folder(tmp_path: Path) -> None:
    with pytest.raises(FasttrainError) as caught, scratch_made(str(tmp_path / "none" / "scratch")):
        pass
    assert (caught.value.slug, caught.value.exit_code) == ("tune-writes", 69)


THREADS = Compared(
    ("threads",), "1", "faster", Ratio(0.80, 0.82, 0.85), 0.01, 0.012, 20, 300, 0.0,
    Parity(True, "all 90 losses have the same bits"), kept=True, against="2",
    variable="OMP_NUM_THREADS=1",
)  # fmt: skip


def test_a_kept_setting_is_in_the_command_and_its_row(tuned: TuningPlan, capsys: Any) -> None:
    report = TuningReport("decided", 9, 1.0, None, (FASTER,), settings=(THREADS,))
    out = printed(report, tuned, capsys)
    assert command(out) == [
        "train.py", "--compile", "default", "--env", "OMP_NUM_THREADS=1",
    ]  # fmt: skip
    (row,) = [line for line in out.splitlines() if "0.820 (0.800 to 0.850)" in line]
    assert row.split()[:4] == ["threads", "1", "against", "2"]


def test_a_kept_option_is_in_the_command(tuned: TuningPlan, capsys: Any) -> None:
    ranks = replace(THREADS, levers=("ranks",), asked="2", variable="--nproc-per-node=2")
    out = printed(TuningReport("decided", 0, 1.0, settings=(ranks,)), tuned, capsys)
    assert command(out) == ["train.py", "--nproc-per-node", "2"]


def test_a_setting_alone_is_a_result(tuned: TuningPlan, capsys: Any) -> None:
    out = printed(TuningReport("decided", 0, 1.0, settings=(THREADS,)), tuned, capsys)
    assert command(out) == ["train.py", "--env", "OMP_NUM_THREADS=1"]
    slower = replace(THREADS, verdict="slower", kept=False, reason="steps are slower with it")
    out = printed(TuningReport("decided", 0, 1.0, settings=(slower,)), tuned, capsys)
    assert "fasttrain run" not in out
    assert "slower with it" in out


def test_what_flags_have_decided_is_in_the_command(tuned: TuningPlan, capsys: Any) -> None:
    plan = plan_for("8xh100", compile="default", amp="fp16", optimizer="keep")
    left = {"amp": "it is on all the time", "optimizer": "asked for by --optimizer"}
    report = TuningReport("decided", 9, 1.0, None, (FASTER,))
    out = printed(report, replace(tuned, plan=plan, left=left), capsys)
    assert command(out) == [
        "train.py", "--amp", "fp16", "--optimizer", "keep", "--compile", "default",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("budget_s", "count", "kept_s"),
    [(60, 2, 0), (90, 2, 30), (100, 2, 30), (300, 2, 60), (300, 3, 90), (300, 6, 120), (300, 0, 0)],
)
def test_a_part_of_the_budget_is_kept_for_settings(
    budget_s: float, count: int, kept_s: float
) -> None:
    candidates = [Candidate("threads", str(n), "OMP_NUM_THREADS", str(n)) for n in range(count)]
    found_s = _settings_s(budget_s, ProcessSettings(tuple(candidates)))
    assert found_s == pytest.approx(kept_s)
