"""How a job ended, from SLURM's word and from what its tasks left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.codec import dumps
from fasttrain.model.errors import ExitCode
from fasttrain.model.job import TaskEnd
from fasttrain.slurm.follow import BROUGHT_ABOUT, FORGOTTEN, last_ends, last_words, read_ending
from fasttrain.slurm.state import JobState


def leave(run_dir: str, *codes: int, attempt: int = 0) -> None:
    folder = Path(run_dir, "tasks", str(attempt))
    folder.mkdir(parents=True)
    for task, code in enumerate(codes):
        (folder / f"end-{task}.json").write_text(dumps(TaskEnd(task, code, ended_ns=task)))


@pytest.mark.parametrize(
    ("state", "slurms", "tasks", "code", "why"),
    [
        ("COMPLETED", 0, (0, 0), 0, ""),
        ("FAILED", 7, (7, 137), 7, ""),
        ("FAILED", 1, (), 1, ""),  # it never came to a task
        ("TIMEOUT", 143, (), 143, BROUGHT_ABOUT["TIMEOUT"]),
        ("NODE_FAIL", 0, (), ExitCode.UNAVAILABLE, BROUGHT_ABOUT["NODE_FAIL"]),
        ("CANCELLED", 143, (3,), 3, BROUGHT_ABOUT["CANCELLED"]),
        ("UNKNOWN", None, (0, 0), 0, ""),  # forgotten, and without accounting
        ("UNKNOWN", None, (9,), 9, ""),
        ("UNKNOWN", None, (), ExitCode.UNAVAILABLE, FORGOTTEN),
    ],
)
def test_the_scripts_own_code_wins(
    make_job: Any, state: str, slurms: int | None, tasks: tuple[int, ...], code: int, why: str
) -> None:
    job = make_job()
    if tasks:
        leave(job.run_dir, *tasks)
    ending = read_ending(job, {job.job_id: JobState(job.job_id, state, exit_code=slurms)})
    assert ending.exit_code == code
    assert why in ending.cells[0].why
    assert bool(why) == bool(ending.cells[0].why)


def test_a_sweep_ends_as_its_first_cell_that_failed(make_job: Any) -> None:
    job = make_job(cells=3)
    leave(job.cells[1], 5)
    leave(job.cells[2], 6)
    words = {"12_0": "COMPLETED", "12_1": "FAILED", "12_2": "FAILED"}
    ending = read_ending(job, {name: JobState(name, word) for name, word in words.items()})
    assert ending.exit_code == 5
    assert [cell.exit_code for cell in ending.cells] == [0, 5, 6]
    assert [cell.run_dir for cell in ending.cells] == list(job.cells)


def test_only_the_latest_attempt_counts_and_half_a_file_tells_nothing(make_job: Any) -> None:
    run_dir = make_job().run_dir
    for attempt, code in ((2, 2), (10, 0), (9, 9)):
        leave(run_dir, code, attempt=attempt)
    Path(run_dir, "tasks", "10", "end-1.json").write_text('{"exit_co')
    assert [end.exit_code for end in last_ends(Path(run_dir))] == [0]
    assert last_ends(Path(run_dir, "none")) == []


def test_the_last_words_are_this_jobs_and_few(make_job: Any) -> None:
    job = make_job()
    folder = Path(job.run_dir, "slurm")
    folder.mkdir()
    (folder / "12_0_log.err").write_text("\n".join(map(str, range(40))))
    (folder / "13_0_log.err").write_text("another's")
    words = last_words(job)
    assert words == [f"[12_0_log] {number}" for number in range(20, 40)]
