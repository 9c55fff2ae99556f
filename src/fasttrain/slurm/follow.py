"""Follow a job until it has ended: its state, and the output of rank 0."""

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
