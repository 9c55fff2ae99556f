"""Find the jobs that fasttrain sent: by their run directories, or by their logs in SLURM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fasttrain.hardware.tool import ToolError
from fasttrain.model.codec import CodecError, loads
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import SUBMITIT_FOLDER, SUBMITTED_FILE, SubmittedJob
from fasttrain.model.places import RUNS_FOLDER
from fasttrain.model.reading import open_regular
from fasttrain.slurm.state import ask

_JOB_ID = re.compile(r"([1-9][0-9]{0,17})(?:_([0-9]{1,9}))?")


def submitted_jobs(cwd: Path) -> list[SubmittedJob]:
    """Return the jobs that were sent from a folder, in the order of sending."""
    found = (_read(path) for path in (cwd / RUNS_FOLDER).glob(f"*/{SUBMITTED_FILE}"))
    return sorted((job for job in found if job), key=lambda job: job.submitted_s)


def find_job(job_id: str | None, cwd: Path, environ: Mapping[str, str]) -> SubmittedJob:
    """Return one job.

    Args:
        job_id: Its number; that of an element means its array. None for the latest of this folder.
        cwd: Folder from which it was sent. While SLURM knows the job, any folder works.
        environ: The environment.

    Raises:
        FasttrainError: ``job-id`` if it is not a number; ``job-unknown`` if fasttrain sent no such
            job, or another user did.
    """
    sent = submitted_jobs(cwd)
    if job_id is None:
        if sent:
            return sent[-1]
        raise _unknown("there is no job", f"{cwd / RUNS_FOLDER} contains none")
    number = check_id(job_id)[0]
    for job in reversed(sent):
        if job.job_id == number:
            return job
    return _by_log(number, environ)


def check_id(job_id: str) -> tuple[str, int | None]:
    """Return the number of a job and the index of the element, which is None for a whole job.

    Raises:
        FasttrainError: ``job-id`` for any other text.
    """
    found = _JOB_ID.fullmatch(job_id)
    if found:
        return found[1], None if found[2] is None else int(found[2])
    raise FasttrainError(
        f"{job_id!r} is not a job number",
        why="SLURM numbers jobs like 1234, and elements of job arrays like 1234_0",
        fix="fasttrain job list shows those sent from this folder",
        slug="job-id",
        exit_code=ExitCode.USAGE,
    )


def _by_log(number: str, environ: Mapping[str, str]) -> SubmittedJob:
    """Return a job of another folder, found by its log, which is in its run directory."""
    try:
        states = ask([number], environ)
    except ToolError as error:
        raise _unknown(f"job {number} was not sent from this folder", str(error)) from error
    for state in states.values():
        folder = Path(state.stdout).parent
        job = _read(folder.parent / SUBMITTED_FILE) if folder.name == SUBMITIT_FOLDER else None
        if job and job.job_id == number:
            return job
    why = "it was not sent from this folder, and SLURM knows no log of it in a run directory"
    raise _unknown(f"job {number} was not sent by fasttrain", why)


def _read(path: Path) -> SubmittedJob | None:
    """Return the job that a file describes; None if it isn't readable, or is another user's."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            job = loads(SubmittedJob, file.read())
    except (OSError, CodecError):
        return None
    # The file's own place, not the recorded one: the folder may have been moved since.
    cells = tuple(str(path.parent / Path(cell).name) for cell in job.cells)
    return replace(job, run_dir=str(path.parent), cells=cells)


def _unknown(what: str, why: str) -> FasttrainError:
    return FasttrainError(
        what,
        why=why,
        fix="go to the folder from which it was sent; squeue --me lists all of your jobs",
        slug="job-unknown",
        exit_code=ExitCode.UNAVAILABLE,
    )
