from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli.cards.crash import print_crash
from fasttrain.model.crash import Crash, Frame

FRAMES = tuple(Frame(f"/home/me/part{i}.py", i, "step", "x = 1  # [bold]") for i in range(8))
LONG = "word " * 60


@pytest.fixture
def shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def show(*, brief: bool = False, **fields: Any) -> list[str]:
        given = {
            "rank": 1, "ranks": 4, "exit_code": 1, "signal": "", "time_ns": 5, "cause": "slug",
            "why": "it is so", "fix": "do that", "error": "ValueError: so", "frames": FRAMES,
            "log": ("line 1",), "log_file": "rank-1.log", "others": "rank 0 was stopped",
        }  # fmt: skip
        print_crash(Crash(**{**given, **fields}), str(tmp_path / "runs" / "r1"), brief=brief)
        captured = capsys.readouterr()
        assert captured.out == "", "stdout is the script's"
        return captured.err.splitlines()

    return show


def test_all_of_a_hidden_rank(shown: Callable[..., list[str]]) -> None:
    lines = shown()
    assert lines[0] == "fasttrain: rank 1 failed first, with exit code 1        [slug]"
    assert lines[1:9] == [
        f"  /home/me/part{i}.py:{i} in step: x = 1  # [bold]" for i in range(8)
    ]  # fmt: skip
    assert lines[9:] == [
        "  ValueError: so", "  why: it is so", "  fix: do that", "  also: rank 0 was stopped",
        "  log: runs/r1/rank-1.log", "    | line 1",
    ]  # fmt: skip


def test_what_the_screen_holds_is_not_repeated(shown: Callable[..., list[str]]) -> None:
    assert shown(shown=True) == [
        "fasttrain: rank 1 failed first, with exit code 1        [slug]",
        "  why: it is so", "  fix: do that", "  also: rank 0 was stopped",
    ]  # fmt: skip
    # A signal leaves no traceback on it.
    assert "part7.py:7" in shown(shown=True, signal="SIGSEGV")[1]


def test_attempts_before_it_and_why_it_was_the_last(shown: Callable[..., list[str]]) -> None:
    told = {"earlier": "attempt 1: killed at step 5", "final": "all 2 restarts were used"}
    lines = shown(shown=True, **told)
    assert lines[-2:] == [
        "  tried: attempt 1: killed at step 5", "  again: no: all 2 restarts were used",
    ]  # fmt: skip
    # One process that said all itself gets one line, unless there is this to tell.
    alone = {"shown": True, "ranks": 1, "fix": "", "others": ""}
    assert len(shown(**alone)) == 1
    assert shown(**alone, **told)[-2:] == lines[-2:]


def test_a_rank_of_another_node_is_told_with_it(shown: Callable[..., list[str]]) -> None:
    (head, *_) = shown(node="node7", log_file="")
    assert head == "fasttrain: rank 1 on node7 failed first, with exit code 1        [slug]"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"cause": "exit", "why": "the script ended itself"},
            ["fasttrain: the script ended itself"],
        ),
        ({"cause": "stopped", "signal": "SIGTERM"}, ["fasttrain: it is so"]),
        ({}, ["fasttrain: the script failed with exit code 1: it is so"]),
        ({"cause": "refused", "fix": "do that"}, []),
    ],
)
def test_one_line_is_enough_for_one_process_that_has_said_it_all(
    shown: Callable[..., list[str]], fields: dict[str, str], expected: list[str]
) -> None:
    assert shown(**{"ranks": 1, "rank": 0, "shown": True, "fix": "", **fields}) == expected


def test_quiet(shown: Callable[..., list[str]]) -> None:
    assert shown(brief=True, why=LONG)[1:] == [f"  why: {LONG[:69].rstrip()}...", "  fix: do that"]
    assert shown(brief=True, ranks=1, shown=True) == []
    assert len(shown(brief=True, ranks=1, shown=False)) == 3


def test_it_fits_into_eighty_columns_and_is_short(shown: Callable[..., list[str]]) -> None:
    texts = dict.fromkeys(("why", "fix", "error", "others"), LONG * 9)
    lines = shown(**texts, log=(LONG,), frames=(Frame("/f" * 50, 1, "f", LONG),))
    assert max(map(len, lines)) <= 80
    assert len(lines) < 20
    alone = shown(ranks=1, shown=True, why=LONG, fix=LONG, others="", signal="SIGSEGV")
    assert len(alone) <= 6


@pytest.mark.parametrize("brief", [False, True])
def test_a_refusal_on_a_hidden_rank_says_what_it_is(
    shown: Callable[..., list[str]], brief: bool
) -> None:
    what = f"the ranks parted: rank 0 is to call Net at train.py:7, {LONG}rank 1 at train.py:9"
    error = f"FasttrainError: error: {what}\n  why: it is so\n  fix: do that        [ranks-apart]"
    lines = shown(brief=brief, cause="refused", shown=False, error=error, frames=FRAMES[:1])
    head, *rest = [line for line in lines if "part0.py" not in line]
    assert head.endswith("        [ranks-apart]")
    assert [line.strip() for line in rest[:3]] == [what, "why: it is so", "fix: do that"]
