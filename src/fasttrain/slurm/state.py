"""The states of jobs: from squeue, and from the accounting for jobs that squeue has forgotten.

submitit's own watcher isn't used: without accounting its states stay UNKNOWN, and it waits for ever
for a job that ended without a result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fasttrain.files import open_regular
from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.model.codec import CodecError, loads
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import SUBMITIT_FOLDER, SUBMITTED_FILE, SubmittedJob
from fasttrain.model.places import RUNS_FOLDER
from fasttrain.slurm.refusals import no_slurm

TIMEOUT_S = 20.0  # a busy controller is slow

# Source: squeue(1), SLURM 22.05, --Format; `exit_code` is a status as waitpid gives it.
_SQUEUE = "JobArrayID:|,State:|,Reason:|,exit_code:|,RestartCnt:|,NodeList:|,STDOUT:|"
# Source: sacct(1), SLURM 22.05; ExitCode is CODE:SIGNAL.
_SACCT = "JobID,State,Reason,ExitCode,NodeList"
# Source: squeue(1), SLURM 22.05, "JOB STATE CODES".
GOING = frozenset(
    {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING",
     "STAGE_OUT", "STOPPED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
     "RESV_DEL_HOLD"}
)  # fmt: skip
UNKNOWN = "UNKNOWN"
_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class JobState:
    """One job, or one element of an array.

    Attributes:
        job_id: Its number, ``1234`` or ``1234_0``.
        state: SLURM's word; ``UNKNOWN`` if SLURM doesn't know the job.
        reason: Why it is in that state, in SLURM's word; empty without a reason.
        exit_code: Exit code of the batch script, or 128 + signal; None while it runs.
        restarts: How often it was requeued.
        nodes: Names of its nodes, in SLURM's notation.
        stdout: Path pattern of its log; empty if unknown.
    """

    job_id: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    nodes: str = ""
    stdout: str = ""

    @property
    def ended(self) -> bool:
        """True if the job will not run any more."""
        return self.state not in GOING

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes and self.state == "RUNNING" else ""
        why = f" ({self.reason})" if self.reason and not where else ""
        return f"{self.state}{where}{why}"


def ask(job_ids: Iterable[str], environ: Mapping[str, str]) -> dict[str, JobState]:
    """Return the states of jobs by number; those of job arrays by the numbers of their elements.

    Args:
        job_ids: Numbers of jobs or arrays.
        environ: The environment.

    Raises:
        FasttrainError: ``slurm-missing`` if there is no squeue.
        ToolError: If the controller doesn't answer.
    """
    host, wanted = Host(environ), list(dict.fromkeys(job_ids))
    squeue, sacct = host.which("squeue"), host.which("sacct")
    if not squeue:
        raise no_slurm()
    found = _squeue(squeue, wanted)
    # squeue forgets a job some minutes after its end (MinJobAge in slurm.conf).
    forgotten = [job for job in wanted if not any(_belongs(known, job) for known in found)]
    if forgotten and sacct:
        found |= _sacct(sacct, forgotten)
    return found


def _belongs(element: str, job: str) -> bool:
    return element == job or element.startswith(f"{job}_")


def _squeue(tool: str, job_ids: list[str]) -> dict[str, JobState]:
    # Forgotten numbers are an error only if squeue knows none of the others either.
    argv = [tool, "--noheader", "--states=all", "--array", f"--jobs={','.join(job_ids)}"]
    try:
        text = run_tool([*argv, f"--Format={_SQUEUE}"], timeout_s=TIMEOUT_S)
    except ToolError as error:
        if _UNKNOWN_JOB.search(str(error)):
            return {}
        raise
    return {state.job_id: state for state in parse_squeue(text)}


def parse_squeue(text: str) -> Iterator[JobState]:
    """Yield the states in squeue's output, one line per job or element."""
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) < 7 or not cells[3].isdecimal():
            continue  # another kind of line, such as a note from the site's own wrapper
        job_id, state, reason, status, restarts, nodes, stdout = cells[:7]
        ended = state not in GOING
        yield JobState(
            job_id=job_id,
            state=state,
            reason="" if reason == "None" else reason,
            exit_code=_of_status(int(status)) if ended else None,
            restarts=int(restarts) if restarts.isdecimal() else 0,
            nodes=nodes,
            stdout=stdout,
        )


def _of_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _sacct(tool: str, job_ids: list[str]) -> dict[str, JobState]:
    argv = [tool, "--noheader", "--allocations", "--parsable2", f"--jobs={','.join(job_ids)}"]
    try:
        text = run_tool([*argv, f"--format={_SACCT}"], timeout_s=TIMEOUT_S)
    except ToolError:
        return {}  # a cluster without accounting: the run directory has to suffice
    return {state.job_id: state for state in parse_sacct(text)}


def parse_sacct(text: str) -> Iterator[JobState]:
    """Yield the states in sacct's output, one line per job or element."""
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != 5 or ":" not in cells[3]:
            continue
        job_id, state, reason, codes, nodes = cells
        word = state.split()[0]  # "CANCELLED by 1000"
        code, _, signum = codes.partition(":")
        exit_code = 128 + int(signum) if int(signum) else int(code)
        yield JobState(
            job_id=job_id,
            state=word,
            reason="" if reason == "None" else reason,
            exit_code=None if word in GOING else exit_code,
            nodes="" if nodes == "None assigned" else nodes,
        )


# Find the jobs that fasttrain sent: by their run directories, or by their logs in SLURM.


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
