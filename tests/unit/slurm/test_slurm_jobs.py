"""Finding jobs by their run directories, and by what SLURM knows of their logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.hardware.tool import ToolError
from fasttrain.model.codec import dumps
from fasttrain.model.errors import FasttrainError
from fasttrain.model.job import SUBMITTED_FILE, SubmittedJob
from fasttrain.slurm import state
from fasttrain.slurm.state import JobState, check_id, find_job, submitted_jobs


@pytest.fixture
def sent(make_job: Any) -> list[SubmittedJob]:
    """Three jobs; the one that was sent last has the smallest number."""
    made = [make_job(number, submitted_s=at) for number, at in (("30", 1), ("20", 2), ("10", 3))]
    for job in made:
        Path(job.run_dir, SUBMITTED_FILE).write_text(dumps(job))
    return made


def answers(monkeypatch: pytest.MonkeyPatch, answer: Mapping[str, JobState] | ToolError) -> None:
    def ask(job_ids: list[str], environ: Mapping[str, str]) -> Mapping[str, JobState]:
        if isinstance(answer, ToolError):
            raise answer
        return answer

    monkeypatch.setattr(state, "ask", ask)


def test_those_of_a_folder_in_the_order_in_which_they_were_sent(
    tmp_path: Path, sent: list[SubmittedJob]
) -> None:
    assert submitted_jobs(tmp_path) == sent
    assert submitted_jobs(tmp_path / "elsewhere") == []


def test_files_that_tell_of_no_job_are_passed_over(
    tmp_path: Path, sent: list[SubmittedJob]
) -> None:
    Path(sent[0].run_dir, SUBMITTED_FILE).write_text("{")
    Path(sent[1].run_dir, SUBMITTED_FILE).unlink()
    assert submitted_jobs(tmp_path) == sent[2:]


def test_the_latest_and_one_by_number_and_one_by_its_element(
    tmp_path: Path, sent: list[SubmittedJob]
) -> None:
    assert find_job(None, tmp_path, {}) == sent[2]
    assert find_job("30", tmp_path, {}) == sent[0]
    assert find_job("20_3", tmp_path, {}) == sent[1]


@pytest.mark.parametrize(
    ("text", "parts"), [("12", ("12", None)), ("12_0", ("12", 0)), ("12_34", ("12", 34))]
)
def test_numbers(text: str, parts: tuple[str, int | None]) -> None:
    assert check_id(text) == parts


@pytest.mark.parametrize("text", ["", "0", "x", "12_", "12.0", "-1", "12 13", "12_x", "１２"])
def test_what_is_no_number_never_reaches_slurm(text: str) -> None:
    with pytest.raises(FasttrainError) as caught:
        check_id(text)
    assert caught.value.slug == "job-id"


def test_one_of_another_folder_by_its_log(
    tmp_path: Path, sent: list[SubmittedJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = f"{sent[0].run_dir}/slurm/%j_0_log.out"
    answers(monkeypatch, {"30": JobState("30", "RUNNING", stdout=log)})
    assert find_job("30", tmp_path / "elsewhere", {}) == sent[0]


@pytest.mark.parametrize("log", ["", "/dev/null", "{run_dir}/%j.out", "{run_dir}/slurm/%j.out"])
def test_a_job_of_somebody_elses_making_is_none_of_ours(
    tmp_path: Path, sent: list[SubmittedJob], monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    # The last log lies in a run directory, but another job was sent from that.
    Path(sent[0].run_dir, SUBMITTED_FILE).write_text(dumps(replace(sent[0], job_id="31")))
    stdout = log.format(run_dir=sent[0].run_dir)
    answers(monkeypatch, {"30": JobState("30", "RUNNING", stdout=stdout)})
    with pytest.raises(FasttrainError) as caught:
        find_job("30", tmp_path / "elsewhere", {})
    assert caught.value.slug == "job-unknown"


def test_a_controller_that_is_silent_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, ToolError("squeue gave no answer in 20 s"))
    with pytest.raises(FasttrainError) as caught:
        find_job("30", tmp_path, {})
    assert "no answer" in caught.value.why


def test_a_folder_without_jobs(tmp_path: Path) -> None:
    with pytest.raises(FasttrainError) as caught:
        find_job(None, tmp_path, {})
    assert caught.value.slug == "job-unknown"
