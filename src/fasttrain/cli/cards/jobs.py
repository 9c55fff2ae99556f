"""The output of ``fasttrain job``, and of the end of a job that was waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fasttrain.cli.cards.crash import print_crash
from fasttrain.cli.cards.hang import print_hang
from fasttrain.cli.cards.receipt import print_receipt, seconds
from fasttrain.cli.console import stderr_console, stdout_console
from fasttrain.launch.report.receipts import read_hang
from fasttrain.model.codec import CodecError
from fasttrain.model.job import JOB_FILE, JobRequest, SubmittedJob
from fasttrain.model.outcome import Receipt
from fasttrain.model.reading import load
from fasttrain.slurm.ending import CellEnding, Ending
from fasttrain.slurm.state import UNKNOWN, JobState


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
