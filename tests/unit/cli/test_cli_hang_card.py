from __future__ import annotations

import pytest

from fasttrain.cli.cards.crash import print_hang
from fasttrain.model.hang import Frame, Hang, StuckProcess, StuckRank

MAIN = Frame("train.py", 40, "<module>", "main()", user=True)
SLEEPS = (Frame("train.py", 28, "main", "time.sleep(600)", user=True), MAIN)
INSIDE = tuple(Frame(f"torch/deep_{n}.py", n, "inner") for n in range(9))
WAITS = (*INSIDE, Frame("train.py", 31, "main", "all_reduce(x)", user=True), MAIN)
IDLE = (Frame("selectors.py", 415, "select"),)
LONG = "rank 0 doesn't: it is at train.py:28 in main: " + "value = compute(value); " * 9


def card(capsys: pytest.CaptureFixture[str], *ranks: StuckRank, action: str = "stop") -> str:
    hang = Hang("r1", 63.2, 60.0, action, (LONG,), ranks)  # type: ignore[arg-type]
    print_hang(hang, "runs/r1")
    return capsys.readouterr().err


def rank(number: int, stack: tuple[Frame, ...], *more: StuckProcess) -> StuckRank:
    return StuckRank(number, 1200 + number, (StuckProcess(number, "rank", (stack,)), *more))


def test_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    text = card(capsys, rank(0, SLEEPS), rank(1, WAITS), rank(2, WAITS))
    lines = text.splitlines()
    assert lines[0] == "fasttrain: no progress for 63.2 s, after step 1,202"
    assert max(map(len, lines)) <= 80
    assert "  ranks 1-2" in lines, "stacks that are alike are shown once"
    at = lines.index("  ranks 1-2")
    # The innermost frames, and the user's own among the others.
    assert [line.split()[0] for line in lines[at + 1 : at + 7]] == [
        "torch/deep_0.py:0", "torch/deep_1.py:1", "torch/deep_2.py:2",
        "train.py:31", "train.py:40", "6",
    ]  # fmt: skip
    assert "stops the run" in text
    assert lines[-1] == "  all stacks: runs/r1/hang.json"


def test_processes_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    helpers = (
        StuckProcess(71, "loader worker", (IDLE,)),
        StuckProcess(72, "loader worker", (SLEEPS,)),
        StuckProcess(73, "child", (IDLE,)),
        StuckProcess(74, "child", (), "no way in"),
    )
    text = card(capsys, rank(0, SLEEPS, *helpers), action="report")
    assert "rank 0, DataLoader worker 72" in text
    assert "rank 0, child process 73" in text
    assert " 71" not in text, "it waits for work"
    assert " 74" not in text, "it has no stack"
    assert "the run goes on" in text


def test_a_process_that_is_spared(capsys: pytest.CaptureFixture[str]) -> None:
    text = card(capsys, rank(0, SLEEPS), action="spare")
    assert "the run goes on (--hang-timeout SECONDS would end it)" in text
    assert "stops" not in text


def test_many_ranks_at_many_places(capsys: pytest.CaptureFixture[str]) -> None:
    stacks = [(Frame("train.py", n, "main", user=True),) for n in range(12)]
    text = card(capsys, *(rank(n, stack) for n, stack in enumerate(stacks)))
    assert "4 more stacks" in text
