"""The end of a job, from SLURM's word and from what the tasks left in the run directory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fasttrain.launch.node_run import Ended
from fasttrain.launch.report.receipts import gather, read_receipt
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import SUBMITIT_FOLDER, TASKS_FOLDER, SubmittedJob, TaskEnd
from fasttrain.model.outcome import Receipt
from fasttrain.model.plan import PLAN_FILE, LaunchPlan
from fasttrain.model.reading import load
from fasttrain.slurm.meeting import run_code
from fasttrain.slurm.state import UNKNOWN, JobState

LAST_LINES = 20
# Ends that SLURM brought about, so that no exit code of the script tells of them.
BROUGHT_ABOUT = {
    "NODE_FAIL": "a node died",
    "BOOT_FAIL": "a node didn't boot",
    "OUT_OF_MEMORY": "it ran out of memory",
    "TIMEOUT": "its time limit was over",
    "DEADLINE": "its deadline was over",
    "CANCELLED": "it was cancelled",
    "PREEMPTED": "it was preempted",
    "REVOKED": "it was revoked",
}
FORGOTTEN = "SLURM no longer knows it, and it left no end"


@dataclass(frozen=True, slots=True)
class CellEnding:
    """The end of one run.

    Attributes:
        run_dir: Its directory.
        state: SLURM's word.
        exit_code: The script's, or 128 + signal, or fasttrain's own.
        receipt: What the ranks reported; None where there was none to report.
        why: Why it ended, where that wasn't the script's doing.
    """

    run_dir: str
    state: JobState
    exit_code: int
    receipt: Receipt | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a job: of its run, or of each cell of a sweep."""

    job: SubmittedJob
    cells: tuple[CellEnding, ...]

    @property
    def exit_code(self) -> int:
        """The exit code of the first cell that failed, or 0."""
        return next((cell.exit_code for cell in self.cells if cell.exit_code), 0)


def read_ending(job: SubmittedJob, states: Mapping[str, JobState]) -> Ending:
    """Return how a job ended."""
    if not job.cells:
        state = states.get(job.job_id, JobState(job.job_id, UNKNOWN))
        return Ending(job, (_cell(job.run_dir, state),))
    found = []
    for index, run_dir in enumerate(job.cells):
        name = f"{job.job_id}_{index}"
        found.append(_cell(run_dir, states.get(name, JobState(name, UNKNOWN))))
    return Ending(job, tuple(found))


def _cell(run_dir: str, state: JobState) -> CellEnding:
    ends = last_ends(Path(run_dir))
    code, why = _code(state, ends)
    return CellEnding(run_dir, state, code, _receipt(Path(run_dir), code, state), why)


def _code(state: JobState, ends: list[TaskEnd]) -> tuple[int, str]:
    why = BROUGHT_ABOUT.get(state.state, "")
    own = run_code(ends)
    if state.state == "COMPLETED":
        return 0, ""
    if own:
        return own, why
    if state.exit_code:
        return state.exit_code, why
    if state.state == UNKNOWN and ends:
        return own, ""
    return ExitCode.UNAVAILABLE, why or FORGOTTEN


def last_ends(run_dir: Path) -> list[TaskEnd]:
    """Return the ends of the tasks in the latest attempt."""
    attempts = [path for path in (run_dir / TASKS_FOLDER).glob("*") if path.name.isdecimal()]
    if not attempts:
        return []
    ends = []
    for path in max(attempts, key=lambda path: int(path.name)).glob("end-*.json"):
        try:
            ends.append(load(TaskEnd, path))
        except (OSError, CodecError):
            continue  # a task that was killed while it wrote tells nothing
    return ends


def _receipt(run_dir: Path, code: int, state: JobState) -> Receipt | None:
    """Return the receipt; made here where the tasks were killed before one of them could."""
    try:
        return read_receipt(run_dir)
    except FasttrainError:
        pass
    try:
        plan = load(LaunchPlan, run_dir / PLAN_FILE)
    except (OSError, CodecError):
        return None
    note = f"SLURM ended the job as {state}; the tasks wrote no receipt themselves."
    ended = Ended(code, 0.0, (note,) if state.ended else ())
    return gather(plan, ended, run_dirs=(run_dir, *others(run_dir)))


def others(run_dir: Path) -> list[Path]:
    """Return the directories of the tasks but the first, in their order."""
    found = [path for path in run_dir.glob("task-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def last_words(job: SubmittedJob) -> list[str]:
    """Return the last lines of SLURM's own logs, for a job that didn't come to its script."""
    folder = Path(job.run_dir) / SUBMITIT_FOLDER
    lines: list[str] = []
    for path in sorted(folder.glob(f"{job.job_id}_*_log.err")):
        text = path.read_text(errors="replace")
        lines += [f"[{path.stem}] {line}" for line in text.splitlines()[-LAST_LINES:]]
    return lines[-LAST_LINES:]


# The warning signal of SLURM: time to save, and an end before SLURM's own.


# What torchrun gives its workers between SIGTERM and SIGKILL, and a little for queueing again.
SHUTDOWN_S = 35.0


class EndWatch:
    """Follows a run for the signal that comes before its time is over.

    The run goes on with the signal, which reached its workers too, until it ends by itself or the
    time to shut down has come.

    Attributes:
        warned: Whether the signal came.
        stopped: Whether something had the run end: SLURM, a user, or this watch.
    """

    def __init__(self, name: str, lead_s: int) -> None:
        self.warned = False
        self.stopped = False
        self._signum = signal.Signals["SIG" + name]
        self._patience_s = max(lead_s - SHUTDOWN_S, lead_s / 2)
        self._due_s = 0.0

    def heard(self, signum: int) -> None:
        """Take note of a signal that was passed on to the run."""
        if signum == self._signum and not self.warned:
            self.warned = True
            self._due_s = time.monotonic() + self._patience_s
        if signum in (signal.SIGTERM, signal.SIGINT):
            self.stopped = True

    def tick(self) -> None:
        """End a run that goes on until shortly before SLURM would kill it."""
        if self.warned and not self.stopped and time.monotonic() > self._due_s:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGTERM)
