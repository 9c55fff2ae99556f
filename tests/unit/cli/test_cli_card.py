from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain import __version__
from fasttrain.cli.cards.receipt import counted, print_receipt, seconds, speed
from fasttrain.cli.console import envelope
from fasttrain.model.attempts import Attempt
from fasttrain.model.codec import dumps, from_data
from fasttrain.model.crash import Crash
from fasttrain.model.errors import size
from fasttrain.model.outcome import Outcome, RankReport, Receipt, State, StepStats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 us"), (0.000812, "812 us"), (0.0123, "12.3 ms"), (0.9994, "999 ms"),
        (0.9996, "1000 ms"),
        (41.23, "41.2 s"), (119.4, "119 s"), (150, "2 min"), (3599, "1 h 00 min"),
        (3720, "1 h 02 min"), (90_000, "25 h 00 min"),
    ],
)  # fmt: skip
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"),
        (3 << 30, "3 GiB"), (80 << 30, "80 GiB"), ((1 << 40) - 1, "1024 GiB"),
    ],
)  # fmt: skip
def test_size(value: int, text: str) -> None:
    assert size(value) == text


@given(st.floats(0, 1e7), st.integers(0, 1 << 45))
def test_figures_are_short_and_never_in_powers_of_ten(duration: float, count: int) -> None:
    for text in (seconds(duration), size(count)):
        assert len(text) < 16
        assert "e+" not in text


def test_speed_leaves_out_what_is_not_known() -> None:
    assert speed(StepStats(peak_memory_bytes=1 << 20)) == (
        "no optimizer step was seen; peak memory 1 MiB"
    )
    told = speed(StepStats(steps=1, first_step_s=2.0))
    assert told == "1 step, first step after 2 s, peak memory 0 B"
    assert speed(StepStats(steps=3, are_passes=True)).startswith("3 backward passes, ")
    assert speed(StepStats(steps=1, are_passes=True)).startswith("1 backward pass, ")
    killed = speed(StepStats(steps=1234, reported_until=1200))
    assert killed.startswith("1,234 steps, all other figures and counts until step 1,200, ")
    fed = StepStats(steps=3, samples_per_s=8.0, tokens_per_s=2048.0)
    assert "8 samples/s (2,048 tokens/s), " in speed(fed)
    resumed = speed(StepStats(steps=40, resumed_from=12))
    assert resumed.startswith("40 steps, 12 of them before the snapshot, ")
    full = speed(StepStats(2000, 0.01, 0.02, 800.0, 3.0, 40.0, 1 << 30))
    for part in ("2,000 steps", "median 10 ms, p95 20 ms", "800 samples/s", "compile 40 s"):
        assert part in full


@pytest.fixture
def printed(
    receipt: Callable[..., Receipt], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> Callable[..., str]:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def show(*args: Any, **changes: Any) -> str:
        print_receipt(receipt(*args, **changes))
        captured = capsys.readouterr()
        assert captured.out == "", "stdout is the script's"
        return re.sub(" +", " ", captured.err)

    return show


def test_receipt_says_what_took_effect(printed: Callable[..., str]) -> None:
    text = printed()
    for part in (
        "train.py --lr 3 ended with exit code 0 after 75 s",
        "amp applied bfloat16: Net (train.py:0), Net (train.py:1)",
        "2 more",
        "2,400 forwards",
        "compile left to the script the script compiles",
        "warning: a warning",
        "hint: a hint",
        "kept in fasttrain_runs/r1",
    ):
        assert part in text.replace("\n", " ").replace("  ", " ")
    assert "casts" not in text


def test_a_lever_that_met_nothing_had_no_effect(printed: Callable[..., str]) -> None:
    armed = Outcome("amp", "bf16", State.ARMED, reason="no module was called")
    report = RankReport(0, "cpu", "2.13", (armed,), StepStats())
    assert "amp had no effect no module was called" in printed(ranks=(report,))


def test_receipt_says_where_ranks_differ(printed: Callable[..., str]) -> None:
    text = printed(3)
    assert "rank 1 amp failed: out of [bold]memory[/]" in text
    assert "rank 2" not in text
    assert "3 reported; rank 0 is shown" in text


def test_receipt_says_that_a_run_was_started_again(printed: Callable[..., str]) -> None:
    crash = Crash(1, 2, 1, "", 0, "network", "", "", step=12)
    attempts = (Attempt(1, 3.0, "", 2.0, crash, "attempt-1"),)
    told = "restarted: attempt 1: network at step 12"
    assert told in printed(attempts=attempts)
    assert told not in printed(attempts=attempts, crash=crash)  # its card says so


def test_report_shows_the_cause_in_front_of_the_receipt(
    fasttrain_main: Any, receipt: Callable[..., Receipt], tmp_path: Path
) -> None:
    crash = Crash(1, 2, 1, "", 0, "network", "a machine did not answer", "", step=12)
    folder = tmp_path / "fasttrain_runs" / "r1"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "receipt.json").write_text(dumps(replace(receipt(), crash=crash)))
    heads = [line for line in fasttrain_main("report").err.splitlines() if line[:1] == "f"]
    assert [head.partition(" with exit code")[0] for head in heads] == [
        "fasttrain: rank 1 failed first,", "fasttrain: train.py --lr 3 ended"
    ]  # fmt: skip


def test_receipt_of_a_run_without_reports(printed: Callable[..., str]) -> None:
    assert printed(0, warnings=(), hints=()).count("\n") == 2


def test_a_script_that_trained_nothing_has_no_table(printed: Callable[..., str]) -> None:
    outcome = Outcome("amp", "bfloat16", State.ARMED, "no module was called")
    idle = RankReport(0, "", "2.13", (outcome,), StepStats())
    text = printed(0, ranks=(idle,), warnings=(), hints=())
    assert text.splitlines()[0].endswith("with exit code 0 after 75 s; no training was seen")
    assert len(text.splitlines()) == 2, "and where it is kept"
    assert "amp had no effect" in printed(0, ranks=(idle, replace(idle, rank=1, device="cpu")))


def test_lines_in_a_pipe_end_with_their_words(
    receipt: Callable[..., Receipt], capsys: pytest.CaptureFixture[str]
) -> None:
    print_receipt(receipt(2))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 6
    assert [line for line in lines if line != line.rstrip()] == []


def test_nothing_is_coloured_without_a_terminal(printed: Callable[..., str]) -> None:
    assert "\x1b" not in printed(2)


def test_envelope(receipt: Callable[..., Receipt]) -> None:
    content = json.loads(envelope("receipt", receipt()))
    assert (content["schema"], content["fasttrain"], content["kind"]) == (1, __version__, "receipt")
    assert from_data(Receipt, content["data"]) == receipt()


def test_report_shows_the_latest_run(
    fasttrain_main: Any, receipt: Callable[..., Receipt], tmp_path: Path
) -> None:
    assert fasttrain_main("report").code == 69
    for name in ("2026-01-01", "2026-01-02"):
        folder = tmp_path / "fasttrain_runs" / name
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
        (folder / "receipt.json").write_text(dumps(receipt(hints=(f"hint of {name}",))))
    assert "hint of 2026-01-02" in fasttrain_main("report").err
    assert "hint of 2026-01-01" in fasttrain_main("report", "fasttrain_runs/2026-01-01").err
    data = json.loads(fasttrain_main("report", "--json").out)
    assert (data["kind"], data["data"]["hints"]) == ("receipt", ["hint of 2026-01-02"])
    said = fasttrain_main("report", "nowhere")
    assert (said.code, said.out, "[receipt]" in said.err) == (69, "", True)


def test_no_text_is_taken_for_markup(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "[red]x[/red] :smile:" in printed(warnings=("[red]x[/red] :smile:",))


@pytest.mark.parametrize(
    ("name", "one"), [("losses", "loss"), ("batches", "batch"), ("graphs", "graph")]
)
def test_one_of_what_is_counted(name: str, one: str) -> None:
    assert (counted(name, 1), counted(name, 2000)) == (f"1 {one}", f"2,000 {name}")
