"""Follow a job until it has ended: its state, and the output of rank 0."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fasttrain.files import load
from fasttrain.hardware.tool import ToolError
from fasttrain.launch.node_run import Ended
from fasttrain.launch.output.display import Display
from fasttrain.launch.output.relay import EventTail, Tail
from fasttrain.launch.receipts import gather, read_receipt
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import SUBMITIT_FOLDER, TASKS_FOLDER, SubmittedJob, TaskEnd
from fasttrain.model.outcome import Receipt
from fasttrain.model.plan import PLAN_FILE, LaunchPlan
from fasttrain.slurm.meeting import run_code
from fasttrain.slurm.state import UNKNOWN, JobState, ask

# The end of a job, from SLURM's state and from the records of the tasks in the run directory.


LAST_LINES = 20
# Ends that SLURM caused: the script's exit code doesn't explain them.
BROUGHT_ABOUT = {
    "NODE_FAIL": "a node died",
    "BOOT_FAIL": "a node didn't boot",
    "OUT_OF_MEMORY": "it ran out of memory",
    "TIMEOUT": "it reached its time limit",
    "DEADLINE": "it reached its deadline",
    "CANCELLED": "it was cancelled",
    "PREEMPTED": "it was preempted",
    "REVOKED": "it was revoked",
}
FORGOTTEN = "SLURM no longer knows the job, and no task recorded its end"


@dataclass(frozen=True, slots=True)
class CellEnding:
    """The end of one run.

    Attributes:
        run_dir: Its directory.
        state: Its state in SLURM.
        exit_code: The script's exit code, or 128 + signal, or fasttrain's own.
        receipt: The receipt; None if no plan was made, so that there is nothing to report.
        why: Why it ended, if SLURM ended it; else empty.
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
        """Exit code of the first cell that failed, or 0."""
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
            continue  # the task was killed while it wrote
    return ends


def _receipt(run_dir: Path, code: int, state: JobState) -> Receipt | None:
    """Return the receipt; make it here if all tasks were killed before one of them wrote it."""
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
    """Return the directories of all tasks except the first, in their order."""
    found = [path for path in run_dir.glob("task-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def last_words(job: SubmittedJob) -> list[str]:
    """Return the last lines of SLURM's own logs, for a job that didn't get as far as its script."""
    folder = Path(job.run_dir) / SUBMITIT_FOLDER
    lines: list[str] = []
    for path in sorted(folder.glob(f"{job.job_id}_*_log.err")):
        text = path.read_text(errors="replace")
        lines += [f"[{path.stem}] {line}" for line in text.splitlines()[-LAST_LINES:]]
    return lines[-LAST_LINES:]


# torchrun's 30 s between SIGTERM and SIGKILL of its workers, and a little for requeueing.
SHUTDOWN_S = 35.0


class EndWatch:
    """Watches for SLURM's warning signal, and ends the run before SLURM would.

    The signal reaches the workers, too. The run goes on until it ends by itself, or until there is
    just enough time left for a shutdown.

    Attributes:
        warned: Whether the signal came.
        stopped: Whether SLURM, a user or this watch has asked the run to end.
    """

    def __init__(self, name: str, lead_s: int) -> None:
        self.warned = False
        self.stopped = False
        self._signum = signal.Signals["SIG" + name]
        self._patience_s = max(lead_s - SHUTDOWN_S, lead_s / 2)
        self._due_s = 0.0

    def heard(self, signum: int) -> None:
        """Record a signal that was passed on to the run."""
        if signum == self._signum and not self.warned:
            self.warned = True
            self._due_s = time.monotonic() + self._patience_s
        if signum in (signal.SIGTERM, signal.SIGINT):
            self.stopped = True

    def tick(self) -> None:
        """End the run by SIGTERM if it still runs shortly before SLURM would kill it."""
        if self.warned and not self.stopped and time.monotonic() > self._due_s:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGTERM)


# Follow a job until it has ended: its state, and the output of rank 0.


LOOK_S = 0.5  # between reads of files
# Between queries of the controller, which serves everybody. A task's recorded end triggers a query
# at once.
ASK_S = 5.0
PATIENCE_S = 600.0  # a restart of the controller must not end our wait
SILENT = "SLURM doesn't answer"
LOST_AFTER_S = 15.0  # a job may end before squeue or the accounting show its state


def follow(
    job: SubmittedJob,
    environ: Mapping[str, str],
    display: Display | None,
    tell: Callable[[str], None],
    *,
    states: bool = True,
) -> Ending:
    """Wait for a job's end, or for that of the last cell of a sweep; return how it ended.

    Args:
        job: The job.
        environ: The environment.
        display: Shows the output of rank 0 and its progress; None for the state alone.
        tell: Called with one line for each change of state, and if the controller doesn't answer.
        states: Whether to report changes of state.

    Raises:
        FasttrainError: ``slurm-missing``, or ``slurm-down`` after ten minutes without an answer.
    """
    watcher = _Watcher(job, environ, display, tell, states=states)
    while not watcher.look():
        time.sleep(LOOK_S)
    if display:
        display.close()
    return read_ending(job, watcher.states)


class _Watcher:
    def __init__(
        self,
        job: SubmittedJob,
        environ: Mapping[str, str],
        display: Display | None,
        tell: Callable[[str], None],
        *,
        states: bool,
    ) -> None:
        self.states: dict[str, JobState] = {}
        self._job, self._environ, self._display, self._tell = job, environ, display, tell
        self._reports_states = states
        run_dir = Path(job.run_dir)
        self._log = Tail(run_dir / "rank-0.log")
        self._events = EventTail(run_dir / "events-0.jsonl")
        self._asked_s = self._answered_s = time.monotonic() - ASK_S
        self._answered_s += ASK_S
        self._last_line = ""
        self._ends = 0

    def look(self) -> bool:
        """Show new output; return True if the job has ended."""
        self._show(rest=False)
        ends = sum(1 for _ in Path(self._job.run_dir).glob("**/tasks/*/end-*.json"))
        now_s = time.monotonic()
        if now_s - self._asked_s < ASK_S and ends == self._ends:
            return False
        self._asked_s, self._ends = now_s, ends
        if not self._ask(now_s):
            return False
        self._show(rest=True)
        return True

    def _ask(self, now_s: float) -> bool:
        """Query SLURM; return True if the job has ended."""
        from fasttrain.slurm.refusals import down

        try:
            self.states = ask([self._job.job_id], self._environ)
        except ToolError as error:
            if now_s - self._answered_s > PATIENCE_S:
                raise down(str(error), self._job.job_id) from error
            self._say(f"{SILENT}: {error}")
            return False
        if self.states:
            self._answered_s = now_s
        if self._reports_states:
            self._say(_summary(self._job, self.states))
        if not self.states:
            # Either just sent and not listed yet, or ended and already forgotten.
            return now_s - self._answered_s > LOST_AFTER_S
        return all(state.ended for state in self.states.values())

    def _say(self, text: str) -> None:
        if text != self._last_line:
            self._last_line = text
            self._tell(text)

    def _show(self, *, rest: bool) -> None:
        if self._display is None:
            return
        for line in self._log.lines(rest=rest):
            self._display.write(1, line)
        if event := self._events.latest():
            self._display.progress(event)


def _summary(job: SubmittedJob, states: Mapping[str, JobState]) -> str:
    if not job.cells:
        state = next(iter(states.values()), JobState(job.job_id, UNKNOWN))
        return f"job {job.job_id} {state}"
    counts: dict[str, int] = {}
    for state in states.values():
        counts[state.state] = counts.get(state.state, 0) + 1
    listed = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    return f"job {job.job_id}: {listed or UNKNOWN}"
