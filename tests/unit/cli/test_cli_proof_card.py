"""What ``fasttrain run --prove`` prints of a report, and the exit code that it comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.cli.cards.proof import print_proof
from fasttrain.cli.proving import _exit_code
from fasttrain.model.outcome import Outcome, State
from fasttrain.model.proof import Curves, ProofReport, Speed, Window
from fasttrain.model.tuning import UNBOUNDED, Ratio

SPEED = Speed("faster", Ratio(0.7, 0.8, 0.9), 0.008, 0.01, 40, 31.0, 5.0, 11, 13_011)
RIGHT = ProofReport(
    "steps",
    200,
    60.0,
    Curves("within rounding", "at most 1e-05", (Window(1, 20, 2.3, 2.31, 1e-5, 2e-5),)),
    SPEED,
    (
        Outcome("amp", "bf16", State.APPLIED),
        Outcome("compile", "default", State.FAILED, "no compiler"),
    ),
)


def printed(report: ProofReport, capsys: Any) -> str:
    print_proof(report, "/runs/r1")
    out: str = capsys.readouterr().out
    return out


def finding(found: Any, **changes: Any) -> ProofReport:
    return replace(RIGHT, curves=replace(RIGHT.curves, finding=found), **changes)


def test_curves_speed_and_what_took_no_effect_are_shown(capsys: Any) -> None:
    out = printed(RIGHT, capsys)
    assert "but for rounding" in out
    assert "0.800 (0.700 to 0.900" in out
    assert "13,011 steps" in out
    assert "no compiler" in out
    assert "/runs/r1" in out
    assert "amp" not in out, "what took effect is what was asked for"


def test_an_interval_of_which_nothing_is_known_is_not_shown(capsys: Any) -> None:
    unknown = replace(
        SPEED, verdict="undecided", ratio=Ratio(0.0, 0.8, UNBOUNDED), pairs=3, pays_after=None
    )
    out = printed(replace(RIGHT, speed=unknown), capsys)
    assert "3 pairs" in out
    assert "pays" not in out
    assert f"{UNBOUNDED}" not in out


def test_a_verdict_of_the_processors_time_is_said_to_be_one(capsys: Any) -> None:
    assert "processor" not in printed(RIGHT, capsys)
    unsure = replace(SPEED, ratio=Ratio(0.9, 0.98, 1.07))
    assert "processor" in printed(replace(RIGHT, speed=unsure), capsys)


@pytest.mark.parametrize("end", ["steps", "script", "failed", "given up", "interrupted", "running"])
def test_every_end_can_be_printed(end: Any, capsys: Any) -> None:
    empty = ProofReport(end, 0, 1.0, Curves("can't tell", "no optimizer step was seen"))
    assert "no optimizer step" in printed(empty, capsys)


@pytest.mark.parametrize(
    ("report", "signum", "script", "code"),
    [
        (RIGHT, 0, 0, 0),
        (finding("same bits"), 0, 0, 0),
        (finding("differs"), 0, 0, 76),
        (finding("can't tell"), 0, 0, 69),
        (finding("differs", failed={"chosen": "an error"}), 0, 0, 76),
        (finding("can't tell", failed={"plain": "an error"}), 0, 7, 7),
        (finding("can't tell"), 2, 130, 130),
    ],
)
def test_exit_codes(report: ProofReport, signum: int, script: int, code: int) -> None:
    assert _exit_code(report, signum, script) == code
