"""Stays with a job until it has ended: its state, and what rank 0 prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fasttrain.hardware.tool import ToolError
from fasttrain.launch.output.display import Display
from fasttrain.launch.output.follow import EventTail, Tail
from fasttrain.model.job import SubmittedJob
from fasttrain.slurm.ending import Ending, read_ending
from fasttrain.slurm.state import UNKNOWN, JobState, ask

LOOK_S = 0.5  # at files
# At the controller, which serves everybody: seldom, and at once where the files tell of an end.
ASK_S = 5.0
PATIENCE_S = 600.0  # a controller that is restarted must not end our wait
SILENT = "SLURM doesn't answer"
LOST_AFTER_S = 15.0  # between an end and its state in squeue or the accounting


def follow(
    job: SubmittedJob,
    environ: Mapping[str, str],
    display: Display | None,
    tell: Callable[[str], None],
    *,
    states: bool = True,
) -> Ending:
    """Wait for a job's end; for that of its last cell, where it is a sweep.

    Args:
        job: The job.
        environ: The environment.
        display: Shows what rank 0 prints and its progress; None for the state alone.
        tell: Is told, in one line, of each change of state, and of a controller that is silent.
        states: Whether changes of state are told.

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
        self._tells_states = states
        run_dir = Path(job.run_dir)
        self._log = Tail(run_dir / "rank-0.log")
        self._events = EventTail(run_dir / "events-0.jsonl")
        self._asked_s = self._answered_s = time.monotonic() - ASK_S
        self._answered_s += ASK_S
        self._told = ""
        self._ends = 0

    def look(self) -> bool:
        """Show what is new, and say whether the job has ended."""
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
        """Ask SLURM, and say whether the job has ended."""
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
        if self._tells_states:
            self._say(_summary(self._job, self.states))
        if not self.states:
            # Just sent and not listed yet, or ended and forgotten already.
            return now_s - self._answered_s > LOST_AFTER_S
        return all(state.ended for state in self.states.values())

    def _say(self, text: str) -> None:
        if text != self._told:
            self._told = text
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
