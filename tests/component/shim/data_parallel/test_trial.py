"""What a trial says of errors, versions and ranks; torch itself is not imported here."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import pytest

from fasttrain.probes import trial
from fasttrain.probes.forked import RankError, one_line, run_ranks
from fasttrain.probes.trial import cudnn_name

# As inductor reports a compiler that fails (torch 2.13), shortened.
NO_HEADER = """CppCompileError: C++ compile error

Command:
g++ /tmp/c.main.cpp -o /tmp/c.main.so

Output:
/tmp/c.main.cpp:2:10: fatal error: Python.h: No such file or directory
    2 | #include <Python.h>
compilation terminated."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ImportError("no cudart"), "ImportError: no cudart"),
        (RuntimeError("\n\nfirst\nsecond"), "RuntimeError: first"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RankError("ValueError: said by a rank"), "ValueError: said by a rank"),
        (
            RuntimeError(NO_HEADER),
            "RuntimeError: /tmp/c.main.cpp:2:10: fatal error: Python.h: No such file or directory",
        ),
    ],
)
def test_an_error_is_told_in_one_line(error: BaseException, line: str) -> None:
    assert one_line(error) == line


def test_a_long_error_is_cut() -> None:
    assert len(one_line(ValueError("x" * 10_000))) < 1000


# Versions as the archives of cuDNN name them, with the numbers of their headers.
@pytest.mark.parametrize(
    ("number", "name"),
    [(None, ""), (7605, "7.6.5"), (8902, "8.9.2"), (90100, "9.1.0"), (91002, "9.10.2")],
)
def test_cudnn_is_named_as_people_do(number: int | None, name: str) -> None:
    assert cudnn_name(number) == name


def test_ranks_that_end_well_say_nothing(tmp_path: Any) -> None:
    run_ranks(3, lambda rank: (tmp_path / str(rank)).touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_rank_that_fails_is_heard() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("no route\nto host")

    with pytest.raises(RankError, match=r"^ValueError: no route$"):
        run_ranks(2, work)


def test_a_rank_that_dies_is_named_before_those_that_miss_it(tmp_path: Any) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            (tmp_path / "dying").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while not (tmp_path / "dying").exists():
            time.sleep(0.001)
        raise ConnectionError("closed by peer")

    with pytest.raises(RankError, match=r"\brank 1\b.*\bSIGKILL\b"):
        run_ranks(2, work)


def test_a_rank_that_waits_for_one_that_failed_is_ended() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            time.sleep(60)
        raise ValueError("left")

    started_s = time.monotonic()
    with pytest.raises(RankError, match="left"):
        run_ranks(2, work)
    assert time.monotonic() - started_s < 30


def answers(capsys: pytest.CaptureFixture[str], *questions: str) -> tuple[int, list[Any]]:
    code = trial.main(["MARK ", *questions])
    lines = capsys.readouterr().out.splitlines()
    return code, [json.loads(line[5:]) for line in lines if line.startswith("MARK ")]


@pytest.fixture
def _questions(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(doing: trial.Doing) -> dict[str, Any]:
        doing("breaking")
        raise RuntimeError("broken") from OSError("no library")

    def works(_: trial.Doing) -> dict[str, Any]:
        return {"version": "2"}

    monkeypatch.setattr(trial, "QUESTIONS", {"works": works, "breaks": breaks})


@pytest.mark.usefixtures("_questions")
def test_answers_come_one_a_line_and_stop_at_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    code, (works, doing, breaks) = answers(capsys, "works", "breaks", "works")
    assert code == 1
    assert (works["state"], works["facts"]) == ("ok", {"version": "2"})
    assert doing == {"question": "breaks", "doing": "breaking"}
    assert (breaks["state"], breaks["message"]) == ("failed", "RuntimeError: broken")
    assert breaks["cause"] == "OSError: no library"


@pytest.mark.usefixtures("_questions")
def test_an_answer_begins_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    sys.stdout.write("a warning without an end")
    code, (works,) = answers(capsys, "works")
    assert (code, works["state"]) == (0, "ok")
