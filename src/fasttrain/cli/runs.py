"""What ``fasttrain ps`` and ``fasttrain kill`` share: the runs of this machine, shown and ended."""

from __future__ import annotations

from datetime import datetime

from rich.table import Table
from rich.text import Text

from fasttrain.cli.card import size
from fasttrain.cli.console import stdout_console
from fasttrain.config.nearest import nearest
from fasttrain.hardware.holders import held_bytes
from fasttrain.hardware.runs import find_runs
from fasttrain.launch.invocation import working_directory
from fasttrain.processes import launchers
from fasttrain.processes.ending import named
from fasttrain.spec.errors import ExitCode, FasttrainError
from fasttrain.spec.local_run import LocalRun
from fasttrain.spec.outcome import RECEIPT_FILE
from fasttrain.spec.places import RUNS_FOLDER

TITLES = ("run", "state", "started", "processes", "GPU memory", "directory")


def local_runs() -> tuple[LocalRun, ...]:
    """Give this user's runs on this machine."""
    return find_runs(working_directory() / RUNS_FOLDER, held_bytes(), RECEIPT_FILE)


def run_table(runs: tuple[LocalRun, ...]) -> None:
    """Print runs to stdout, one per line."""
    console = stdout_console(width=200)
    if not runs:
        console.print("no run of yours is on this machine")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in TITLES:
        table.add_column(title, overflow="fold")
    for run in runs:
        # Text, not str: a directory with square brackets is no markup.
        table.add_row(*(Text(cell) for cell in _cells(run)))
    console.print(table)


def _cells(run: LocalRun) -> tuple[str, ...]:
    started = f"{datetime.fromtimestamp(run.started_s):%Y-%m-%d %H:%M:%S}"
    memory = size(run.memory_bytes) if run.memory_bytes else ""
    return run.run_id, run.state, started, str(len(run.processes)), memory, run.run_dir


def chosen(
    runs: tuple[LocalRun, ...], run_id: str | None, *, all_runs: bool
) -> tuple[LocalRun, ...]:
    """Give the runs that are meant.

    Raises:
        FasttrainError: ``kill-what`` if neither or both are named; ``run-unknown``.
    """
    if (run_id is not None) == all_runs:
        raise FasttrainError(
            "it isn't clear which run to end",
            why="kill takes the name of one run, or --all",
            fix="fasttrain ps lists them",
            slug="kill-what",
            exit_code=ExitCode.USAGE,
        )
    found = tuple(run for run in runs if all_runs or run.run_id == run_id)
    if run_id is not None and not found:
        names = [run.run_id for run in runs]
        near = nearest(run_id, names) or next(iter(names), "")
        raise FasttrainError(
            f"there is no run {run_id!r} of yours on this machine",
            why=f"those that are: {', '.join(names)}" if names else "no run is",
            fix=f"fasttrain kill {near}" if near else "nothing is left to end",
            slug="run-unknown",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return found


def end_run(run: LocalRun, grace_s: float) -> str:
    """End a run and give what was ended in one line.

    Raises:
        FasttrainError: ``run-left`` if some of it is still there.
    """
    ended = launchers.end_run(run.run_id, grace_s)
    if ended.left:
        raise FasttrainError(
            f"{run.run_id} could not be ended",
            why=f"{named(ended.left)} did not go away",
            fix="it may wait for a device or a disk: look again later, or restart the machine",
            slug="run-left",
            exit_code=ExitCode.UNAVAILABLE,
        )
    hard = f"; {len(ended.killed)} by SIGKILL" if ended.killed else ""
    return f"{run.run_id}: ended {named(ended.ended) or 'nothing, it was over'}{hard}"
