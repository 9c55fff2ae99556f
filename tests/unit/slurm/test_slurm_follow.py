"""Staying with a job: what is asked, told and shown, with answers that were recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fasttrain.hardware.tool import ToolError
from fasttrain.model.errors import FasttrainError
from fasttrain.model.job import SubmittedJob
from fasttrain.slurm import follow as following
from fasttrain.slurm.follow import SILENT, follow
from fasttrain.slurm.state import JobState

Answer = Mapping[str, JobState] | ToolError


def states(*words: str, job_id: str = "12") -> dict[str, JobState]:
    names = [job_id] if len(words) == 1 else [f"{job_id}_{n}" for n in range(len(words))]
    return {name: JobState(name, word) for name, word in zip(names, words, strict=True)}


class Controller:
    """Returns its answers one after the other, and the last one for ever; has its own clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.answers: list[Answer] = []
        self.asked_s: list[float] = []
        self.at: dict[float, Callable[[], Any]] = {}

    def ask(self, job_ids: list[str], environ: Mapping[str, str]) -> Mapping[str, JobState]:
        assert job_ids == ["12"]
        self.asked_s.append(self.now_s)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ToolError):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < 2000, "it never ends"
        if self.now_s in self.at:
            self.at.pop(self.now_s)()


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    made = Controller()
    monkeypatch.setattr(following, "ask", made.ask)
    monkeypatch.setattr(following.time, "monotonic", lambda: made.now_s)
    monkeypatch.setattr(following.time, "sleep", made.sleep)
    return made


class Screen:
    """A display that keeps what it shows."""

    def __init__(self) -> None:
        self.shown = b""
        self.events: list[dict[str, Any]] = []
        self.closed = False

    def write(self, descriptor: int, data: bytes) -> None:
        assert descriptor == 1
        self.shown += data

    def progress(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


def test_each_state_is_told_once_and_the_controller_asked_seldom(
    controller: Controller, make_job: Any
) -> None:
    controller.answers = [states("PENDING"), states("PENDING"), states("RUNNING"),
                          states("COMPLETED")]  # fmt: skip
    told: list[str] = []
    ending = follow(make_job(), {}, None, told.append)
    assert told == [f"job 12 {word}" for word in ("PENDING", "RUNNING", "COMPLETED")]
    assert controller.asked_s == [0, 5, 10, 15]
    assert ending.exit_code == 0


def test_states_may_be_left_untold(controller: Controller, make_job: Any) -> None:
    controller.answers = [states("PENDING"), ToolError("squeue ended with 1"), states("COMPLETED")]
    told: list[str] = []
    follow(make_job(), {}, None, told.append, states=False)
    assert told == [f"{SILENT}: squeue ended with 1"]


def test_an_end_in_the_files_has_it_ask_at_once(controller: Controller, make_job: Any) -> None:
    job: SubmittedJob = make_job()
    folder = Path(job.run_dir, "tasks", "0")
    folder.mkdir(parents=True)
    controller.at[1.0] = (folder / "end-0.json").touch
    controller.answers = [states("RUNNING"), states("COMPLETED")]
    follow(job, {}, None, lambda _: None)
    assert controller.asked_s == [0, 1]


def test_all_that_rank_0_prints_is_shown_the_last_line_without_an_end_too(
    controller: Controller, make_job: Any
) -> None:
    job, screen = make_job(), Screen()
    log, events = Path(job.run_dir, "rank-0.log"), Path(job.run_dir, "events-0.jsonl")

    def goes_on() -> None:
        with log.open("a") as file:
            file.write("two\nthr")
        events.write_text('{"step": 1}\n{"step": 2}\n')

    log.write_text("one\n")
    controller.at[1.0] = goes_on
    controller.answers = [states("RUNNING"), states("COMPLETED")]
    follow(job, {}, screen, lambda _: None)
    assert (screen.shown, screen.events) == (b"one\ntwo\nthr", [{"step": 2}])
    assert screen.closed


def test_a_sweep_is_told_in_one_line_and_shows_no_cells_output(
    controller: Controller, make_job: Any
) -> None:
    job, screen, told = make_job(cells=2), Screen(), list[str]()
    Path(job.cells[0], "rank-0.log").write_text("of one cell among many\n")
    controller.answers = [states("RUNNING", "PENDING"), states("COMPLETED", "COMPLETED")]
    follow(job, {}, screen, told.append)
    assert told == ["job 12: 1 PENDING, 1 RUNNING", "job 12: 2 COMPLETED"]
    assert screen.shown == b""


def test_a_sweep_ends_with_its_last_cell(controller: Controller, make_job: Any) -> None:
    controller.answers = [states("FAILED", "RUNNING"), states("FAILED", "COMPLETED")]
    follow(make_job(cells=2), {}, None, lambda _: None)
    assert len(controller.asked_s) == 2


def test_a_job_that_slurm_has_forgotten_has_ended(controller: Controller, make_job: Any) -> None:
    controller.answers = [states("RUNNING"), {}]
    ending = follow(make_job(), {}, None, lambda _: None)
    assert 15 < controller.now_s < 30
    assert ending.cells[0].state.state == "UNKNOWN"


def test_a_controller_that_is_silent_for_long_ends_the_wait(
    controller: Controller, make_job: Any
) -> None:
    controller.answers = [states("RUNNING"), ToolError("squeue gave no answer in 20 s")]
    told: list[str] = []
    with pytest.raises(FasttrainError) as caught:
        follow(make_job(), {}, None, told.append)
    assert caught.value.slug == "slurm-down"
    assert 600 < controller.now_s < 620
    assert told == ["job 12 RUNNING", f"{SILENT}: squeue gave no answer in 20 s"]
