"""Perform ``fasttrain job``, and wait for a job as ``fasttrain slurm --wait`` does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from fasttrain.cli.cards.progress import choose_display
from fasttrain.cli.commands.job import JobCommand
from fasttrain.cli.console import envelope
from fasttrain.config.environ import read_environ
from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.launch.output.display import write_all
from fasttrain.launch.output.follow import Tail
from fasttrain.launch.start import working_directory
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import SubmittedJob
from fasttrain.slurm.ending import Ending, last_words, others, read_ending
from fasttrain.slurm.follow import follow
from fasttrain.slurm.jobs import check_id, find_job, submitted_jobs
from fasttrain.slurm.refusals import down, no_slurm
from fasttrain.slurm.state import JobState, ask

CANCEL_TIMEOUT_S = 30.0


def perform(request: JobCommand) -> int:
    """Perform the command and return the exit code."""
    actions: dict[str, Callable[[JobCommand, Mapping[str, str]], int]] = {
        "list": _list,
        "show": _show,
        "logs": _logs,
        "wait": _wait,
        "cancel": _cancel,
    }
    return actions[request.action](request, read_environ())


def stay(
    job: SubmittedJob,
    environ: Mapping[str, str],
    *,
    show: bool,
    as_json: bool,
    quiet: bool = False,
) -> int:
    """Wait for a job's end, print it, and return the exit code of its script.

    Args:
        job: The job.
        environ: The environment.
        show: Whether to show the output of rank 0.
        as_json: Whether to print the end as JSON.
        quiet: Whether to print only errors.
    """
    display = choose_display(quiet=quiet) if show else None
    try:
        ending = follow(job, environ, display, _say, states=not quiet)
    except KeyboardInterrupt:
        if display:
            display.close()
        _say(f"the job goes on; fasttrain job cancel {job.job_id} ends it")
        return ExitCode.INTERRUPTED
    if quiet and not as_json and not ending.exit_code:
        return 0
    return _print(ending, shown=show, as_json=as_json)


def _print(ending: Ending, *, shown: bool, as_json: bool) -> int:
    from fasttrain.cli.cards.jobs import print_ending

    if as_json:
        print(envelope("job-ending", ending))  # noqa: T201
        return ending.exit_code
    print_ending(ending, shown=shown)
    if ending.exit_code and not any(cell.receipt for cell in ending.cells):
        for line in last_words(ending.job):
            sys.stderr.write(f"  {line}\n")
    return ending.exit_code


def _list(request: JobCommand, environ: Mapping[str, str]) -> int:
    from fasttrain.cli.cards.jobs import job_rows, print_jobs

    sent = submitted_jobs(working_directory())
    rows = job_rows(sent, _states([job.job_id for job in sent], environ) if sent else {})
    if request.json:
        print(envelope("jobs", rows))  # noqa: T201
    else:
        print_jobs(rows)
    return 0


def _show(request: JobCommand, environ: Mapping[str, str]) -> int:
    from fasttrain.cli.cards.jobs import print_job

    job = find_job(request.job_id, working_directory(), environ)
    ending = read_ending(job, _states([job.job_id], environ))
    if request.json:
        print(envelope("job", ending))  # noqa: T201
    else:
        print_job(ending)
    return 0


def _logs(request: JobCommand, environ: Mapping[str, str]) -> int:
    job = find_job(request.job_id, working_directory(), environ)
    if request.follow and request.rank == 0 and not job.cells:
        return stay(job, environ, show=True, as_json=False)
    run_dir, name = _run_dir(job, request.job_id), f"rank-{request.rank}.log"
    found = [path for where in (run_dir, *others(run_dir)) if (path := where / name).exists()]
    path = found[0] if found else run_dir / name
    for line in Tail(path).lines(rest=True):
        write_all(1, line)
    if not path.exists():
        for text in last_words(job):
            write_all(1, f"{text}\n".encode())
        _say(f"rank {request.rank} has no log yet; fasttrain job show {job.job_id} shows the state")
    return 0


def _run_dir(job: SubmittedJob, job_id: str | None) -> Path:
    cell = check_id(job_id)[1] if job_id else None
    if cell is None or not job.cells:
        return Path(job.run_dir)
    if cell >= len(job.cells):
        raise FasttrainError(
            f"job {job.job_id} has no element {cell}",
            why=f"it has {len(job.cells)}, numbered from 0",
            fix=f"fasttrain job show {job.job_id} lists them",
            slug="job-unknown",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return Path(job.cells[cell])


def _wait(request: JobCommand, environ: Mapping[str, str]) -> int:
    job = find_job(request.job_id, working_directory(), environ)
    return stay(job, environ, show=request.follow, as_json=request.json)


def _cancel(request: JobCommand, environ: Mapping[str, str]) -> int:
    """Cancel a job, but only one that fasttrain sent: a mistyped number must not end other work."""
    job = find_job(request.job_id, working_directory(), environ)
    tool = Host(environ).which("scancel")
    if not tool:
        raise no_slurm()
    target = request.job_id or job.job_id
    try:
        run_tool([tool, target], timeout_s=CANCEL_TIMEOUT_S)
    except ToolError as error:
        raise down(str(error), job.job_id) from error
    _say(f"job {target} was cancelled; its workers get SIGTERM and time to save")
    return 0


def _states(job_ids: list[str], environ: Mapping[str, str]) -> Mapping[str, JobState]:
    try:
        return ask(job_ids, environ)
    except ToolError as error:
        raise down(str(error), job_ids[-1]) from error


def _say(text: str) -> None:
    sys.stderr.write(f"fasttrain: {text}\n")
    sys.stderr.flush()
