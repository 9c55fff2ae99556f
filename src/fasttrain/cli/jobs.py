"""Perform ``fasttrain job``, and wait for a job as ``fasttrain slurm --wait`` does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fasttrain.cli.cards.crash import print_crash, print_hang
from fasttrain.cli.cards.progress import choose_display
from fasttrain.cli.cards.receipt import print_receipt, seconds
from fasttrain.cli.commands.job import JobCommand
from fasttrain.cli.console import envelope, stderr_console, stdout_console
from fasttrain.config.environ import read_environ
from fasttrain.files import load
from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.launch.output.display import write_all
from fasttrain.launch.output.relay import Tail
from fasttrain.launch.receipts import read_hang
from fasttrain.launch.start import working_directory
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import JOB_FILE, JobRequest, SubmittedJob
from fasttrain.model.outcome import Receipt
from fasttrain.slurm.follow import CellEnding, Ending, follow, last_words, others, read_ending
from fasttrain.slurm.refusals import down, no_slurm
from fasttrain.slurm.state import UNKNOWN, JobState, ask, check_id, find_job, submitted_jobs

# The output of ``fasttrain job``, and of the end of a job that was waited for.


@dataclass(frozen=True, slots=True)
class JobRow:
    """One line of ``fasttrain job list``."""

    job_id: str
    state: str
    submitted: str
    nodes: int
    cells: int
    command: str
    run_dir: str


def job_rows(sent: Sequence[SubmittedJob], states: Mapping[str, JobState]) -> tuple[JobRow, ...]:
    """Return one row per job, in the order of `sent`."""
    return tuple(
        JobRow(
            job_id=job.job_id,
            state=_state(job, states),
            submitted=f"{datetime.fromtimestamp(job.submitted_s):%m-%d %H:%M}",
            nodes=job.nodes,
            cells=len(job.cells),
            command=job.command,
            run_dir=job.run_dir,
        )
        for job in sent
    )


def _state(job: SubmittedJob, states: Mapping[str, JobState]) -> str:
    words = [
        state.state
        for name, state in states.items()
        if name == job.job_id or name.startswith(f"{job.job_id}_")
    ]
    counts = {word: words.count(word) for word in words}
    if len(words) == 1:
        return words[0]
    return ", ".join(f"{count} {word}" for word, count in counts.items()) or UNKNOWN


def print_jobs(rows: Sequence[JobRow]) -> None:
    """Print the jobs of a folder to stdout."""
    console = stdout_console()
    if not rows:
        console.print("no jobs were sent from this folder")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("job", "state", "sent", "nodes", "command", "run directory"):
        table.add_column(name, overflow="fold", no_wrap=name == "job")
    for row in rows:
        command = f"{row.command} ({row.cells} cells)" if row.cells else row.command
        cells = (row.job_id, row.state, row.submitted, str(row.nodes), command)
        table.add_row(*cells, Path(row.run_dir).name)
    console.print(table)


def print_job(ending: Ending) -> None:
    """Print one job with its state, and its receipt if it has one."""
    job, console = ending.job, stdout_console()
    console.print(Text(f"job {job.job_id}: {job.command}", style="bold"), soft_wrap=True)
    console.print(Text(f"  run directory {job.run_dir}"), soft_wrap=True)
    if job.cells:
        console.print(_cells_table(ending.cells))
        return
    (cell,) = ending.cells
    again = f", requeued {cell.state.restarts} times" if cell.state.restarts else ""
    console.print(Text(f"  {cell.state}{again}"), soft_wrap=True)
    if cell.state.ended and cell.receipt:
        _print_trouble(cell.receipt, shown=False)
        print_receipt(cell.receipt)


def print_ending(ending: Ending, *, shown: bool) -> None:
    """Print to stderr how a job ended.

    Args:
        ending: The end.
        shown: Whether rank 0's output was on the screen.
    """
    console = stderr_console()
    if ending.job.cells:
        console.print(_cells_table(ending.cells))
        return
    (cell,) = ending.cells
    if cell.why:
        line = f"fasttrain: job {ending.job.job_id} ended as {cell.state.state}: {cell.why}"
        console.print(Text(line, style="bold red"), soft_wrap=True)
    if cell.receipt:
        _print_trouble(cell.receipt, shown=shown)
        print_receipt(cell.receipt)
    else:
        line = f"fasttrain: job {ending.job.job_id} ended with exit code {cell.exit_code}"
        console.print(Text(f"{line}, without a receipt"), soft_wrap=True)


def _print_trouble(receipt: Receipt, *, shown: bool) -> None:
    if hang := read_hang(Path(receipt.run_dir)):
        print_hang(hang, receipt.run_dir)
    if crash := receipt.crash:
        print_crash(replace(crash, shown=crash.shown and shown), receipt.run_dir)


def _cells_table(cells: Sequence[CellEnding]) -> Table:
    """Return the results of a sweep: the values of each cell, its end, and its speed."""
    requests = [_request(cell) for cell in cells]
    names = list(dict.fromkeys(name for request in requests for name in request))
    table = Table(box=None, pad_edge=False)
    for name in ("cell", *names, "state", "exit", "steps", "step time", "last printed"):
        table.add_column(name, overflow="fold")
    for cell, values in zip(cells, requests, strict=True):
        row = [cell.state.job_id.rpartition("_")[2], *(values.get(name, "") for name in names)]
        table.add_row(*row, cell.state.state, *_results(cell))
    return table


def _results(cell: CellEnding) -> tuple[str, ...]:
    code = str(cell.exit_code) if cell.state.ended else ""
    stats = cell.receipt.ranks[0].stats if cell.receipt and cell.receipt.ranks else None
    speed = (str(stats.steps), seconds(stats.median_step_s)) if stats else ("", "")
    return (code, *speed, _last_line(Path(cell.run_dir)))


def _last_line(run_dir: Path) -> str:
    """Return the last line that rank 0 printed, which is usually the script's result."""
    try:
        lines = (run_dir / "rank-0.log").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:60]


def _request(cell: CellEnding) -> dict[str, str]:
    try:
        return load(JobRequest, Path(cell.run_dir, JOB_FILE)).cell
    except (OSError, CodecError):
        return {}  # removed since, or of another version: the rest can still be shown


# Perform ``fasttrain job``, and wait for a job as ``fasttrain slurm --wait`` does.


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

    if as_json:
        print(envelope("job-ending", ending))  # noqa: T201
        return ending.exit_code
    print_ending(ending, shown=shown)
    if ending.exit_code and not any(cell.receipt for cell in ending.cells):
        for line in last_words(ending.job):
            sys.stderr.write(f"  {line}\n")
    return ending.exit_code


def _list(request: JobCommand, environ: Mapping[str, str]) -> int:

    sent = submitted_jobs(working_directory())
    rows = job_rows(sent, _states([job.job_id for job in sent], environ) if sent else {})
    if request.json:
        print(envelope("jobs", rows))  # noqa: T201
    else:
        print_jobs(rows)
    return 0


def _show(request: JobCommand, environ: Mapping[str, str]) -> int:

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
