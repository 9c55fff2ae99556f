"""The records of attempts: put aside, divided, and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.launch.attempts import earlier, told
from fasttrain.launch.crash.evidence import tail
from fasttrain.launch.run_dir.lock import divide_logs, of_last_attempt, put_aside
from fasttrain.model.attempts import NODE_CAME, NODE_LEFT, Attempt, Decided
from fasttrain.model.crash import Crash

CRASH = Crash(3, 4, 1, "", 0, "network", "no answer", "", step=12)


def test_records_are_put_aside_and_what_is_the_scripts_stays(tmp_path: Path) -> None:
    kept = {"plan.json", "rank-0.log", "agent.log", "model.pt", "attempt-1"}
    moved = {"failure-0.json", "rank-0.json", "rank-0.child-7.json", "events-0.jsonl",
             "heartbeat-1.json", "crash.json", "hang.json", "ends.json", "fault-2.txt"}  # fmt: skip
    for name in (kept | moved) - {"attempt-1"}:
        (tmp_path / name).write_text(name)
    assert put_aside(tmp_path, 1) == "attempt-1"
    assert {path.name for path in tmp_path.iterdir()} == kept
    folder = tmp_path / "attempt-1"
    assert {path.name for path in folder.iterdir()} == moved
    assert folder.stat().st_mode & 0o777 == 0o700


def test_attempts_of_a_job_that_was_queued_again_are_all_kept(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / "rank-0.json").touch()
        assert put_aside(tmp_path, 1) == f"attempt-{number}"
    assert put_aside(tmp_path, 1) == "", "there was nothing"


def test_only_what_the_last_attempt_wrote_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("one\nunfinished")
    divide_logs(tmp_path, "end of attempt 1: network")
    with log.open("a") as more:
        more.write("two\n")
    divide_logs(tmp_path, "end of attempt 2: killed")
    assert log.read_text() == (
        "one\nunfinished\n--- fasttrain: end of attempt 1: network ---\n"
        "two\n--- fasttrain: end of attempt 2: killed ---\n"
    )
    assert tail(log) == ""
    with log.open("a") as more:
        more.write("three")
    assert tail(log) == "three"


@pytest.mark.parametrize("text", ["", "a\nb\n", "talk of --- fasttrain: in a line\n"])
def test_a_log_without_a_divider_is_read_whole(text: str) -> None:
    assert of_last_attempt(text) == text


@pytest.mark.parametrize(
    ("decided", "ranks", "line"),
    [
        (Decided(again=True, reason="", delay_s=2, used=1, crash=CRASH), 1,
         "attempt 2 failed: network: no answer; restart 1 of 3 in 2 s"),
        (Decided(again=True, reason="", delay_s=4, used=2, crash=CRASH), 4,
         "attempt 2 failed: rank 3, network: no answer; restart 2 of 3 in 4 s"),
        (Decided(again=True, reason=NODE_LEFT, delay_s=2, crash=CRASH), 4,
         "attempt 2 ended: a node left; starting again with the others in 2 s"),
        (Decided(again=True, reason=NODE_CAME), 4,
         "attempt 2 ended: a node came; starting again with it"),
    ],
)  # fmt: skip
def test_an_attempt_in_one_line(decided: Decided, ranks: int, line: str) -> None:
    assert told(2, decided, 3, ranks) == line


def test_earlier_attempts_in_one_line() -> None:
    attempts = [
        Attempt(1, 3.0, "it may not happen again", 2.0, CRASH, "attempt-1"),
        Attempt(2, 3.0, NODE_CAME, 0.0, None, "attempt-2"),
    ]
    assert earlier(attempts) == "attempt 1: network at step 12; attempt 2: a node came"
    assert earlier([]) == ""
