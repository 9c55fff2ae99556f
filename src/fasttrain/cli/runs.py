"""Perform ``fasttrain ps`` and ``fasttrain kill``: list and end the runs on this machine."""

from __future__ import annotations

import os

from rich.text import Text

from fasttrain.cli.cards.receipt import near
from fasttrain.cli.console import stdout_console
from fasttrain.hardware.runs import find_runs
from fasttrain.hardware.vendors.cuda import held_bytes
from fasttrain.launch.run_dir.paths import matching
from fasttrain.launch.start import working_directory
from fasttrain.model.errors import ExitCode, FasttrainError, size
from fasttrain.model.job import LocalRun
from fasttrain.model.outcome import RECEIPT_FILE
from fasttrain.model.places import RUNS_FOLDER
from fasttrain.processes import launchers
from fasttrain.processes.table import named

NO_RUN = "you have no runs on this machine"
TITLES = ("run", "state", "processes", "GPU memory")  # a run's name begins with its start time


def local_runs() -> tuple[LocalRun, ...]:
    """Return this user's runs on this machine."""
    return find_runs(working_directory() / RUNS_FOLDER, held_bytes(), RECEIPT_FILE)


def run_table(runs: tuple[LocalRun, ...]) -> None:
    """Print runs to stdout, each with its directory; lines aren't folded, for copying names."""
    console = stdout_console()
    if not runs:
        console.print(NO_RUN)
        return
    rows = [TITLES, *map(_cells, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, run in zip(rows, (None, *runs), strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        # Text, not str: square brackets in a directory would be markup.
        line = Text("  ".join(cells).rstrip(), style="" if run else "bold")
        console.print(line, soft_wrap=True)
        if run and run.run_dir:
            console.print(Text(f"  {near(run.run_dir)}", style="dim"), soft_wrap=True)


def _cells(run: LocalRun) -> tuple[str, ...]:
    memory = size(run.memory_bytes) if run.memory_bytes else ""
    return run.run_id, run.state, str(len(run.processes)), memory


def chosen(
    runs: tuple[LocalRun, ...], run_id: str | None, *, all_runs: bool
) -> tuple[LocalRun, ...]:
    """Return the chosen runs: all, or one by its folder or by a unique part of its name.

    Raises:
        FasttrainError: ``kill-what`` if neither or both are given; ``run-unknown`` if no run, or
            more than one, has such a name.
    """
    if (run_id is not None) == all_runs:
        raise FasttrainError(
            "it isn't clear which run to end",
            why="kill takes the name of one run, or --all",
            fix="fasttrain ps lists them",
            slug="kill-what",
            exit_code=ExitCode.USAGE,
        )
    if run_id is None:
        return runs
    by_folder = [run for run in runs if os.sep in run_id and _in_folder(run, run_id)]
    if by_folder:
        return tuple(by_folder)
    names = matching(run_id, [run.run_id for run in runs])
    if len(names) != 1:
        there = names or [run.run_id for run in runs]
        fix = "name one of them in full" if names else "fasttrain ps lists them"
        raise FasttrainError(
            f"you have {'several runs' if names else 'no run'} {run_id!r} on this machine",
            why=f"{'it is a part of' if names else 'your runs are'} {', '.join(there)}"
            if there
            else NO_RUN,
            fix=fix if there else "nothing is left to end",
            slug="run-unknown",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return tuple(run for run in runs if run.run_id == names[0])


def _in_folder(run: LocalRun, folder: str) -> bool:
    return bool(run.run_dir) and os.path.realpath(run.run_dir) == os.path.realpath(folder)


def end_run(run: LocalRun, grace_s: float) -> str:
    """End a run; return one line that names the ended processes.

    Raises:
        FasttrainError: ``run-left`` if some processes still exist.
    """
    ended = launchers.end_run(run.run_id, grace_s)
    if ended.left:
        raise FasttrainError(
            f"{run.run_id} could not be ended",
            why=f"SIGKILL did not end {named(ended.left)}",
            fix="it may wait for a device or a disk: try again later, or restart the machine",
            slug="run-left",
            exit_code=ExitCode.UNAVAILABLE,
        )
    hard = f"; {len(ended.killed)} by SIGKILL" if ended.killed else ""
    return f"{run.run_id}: ended {named(ended.ended) or 'nothing, the run was over'}{hard}"
