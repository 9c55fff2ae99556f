"""The function that submitit calls in each task: run the task's part of the job, record its end."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from submitit.helpers import DelayedSubmission

from fasttrain.config.environ import read_environ
from fasttrain.hardware.host import Host
from fasttrain.hardware.host_state import look_around
from fasttrain.launch.crash.cause_rules import Retry
from fasttrain.launch.crash.causes import retry_of
from fasttrain.launch.node_run import Around, Ended, Part
from fasttrain.launch.output.display import PlainDisplay
from fasttrain.launch.report.receipts import gather
from fasttrain.launch.run_node import attend
from fasttrain.model.codec import CodecError
from fasttrain.model.crash import CRASH_FILE, Crash
from fasttrain.model.errors import FasttrainError
from fasttrain.model.hang import NO_PROGRESS, Hang
from fasttrain.model.job import JOB_FILE, Allocation, JobRequest, TaskEnd
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.reading import load
from fasttrain.planning.slurm.values import signal_and_lead
from fasttrain.slurm.ending import EndWatch
from fasttrain.slurm.meeting import Meeting, first_to_fail, run_code
from fasttrain.slurm.node_part import check_restarts, clean, prepare, read_allocation, task_dir
from fasttrain.slurm.secrets import unmasked


class TaskFailedError(Exception):
    """The run ended with an exit code other than 0; submitit stores this as the task's error."""


@dataclass
class NodeTask:
    """One task of a job; submitit pickles it, so it contains only the run directory.

    Attributes:
        run_dir: The run directory.
    """

    run_dir: str

    def __call__(self) -> int:
        """Run this task's part and return 0.

        Raises:
            TaskFailedError: If the run failed; the process then ends with the run's own exit code.
        """
        environ = read_environ()
        place = read_allocation(environ)
        request = unmasked(self.request(), environ)
        watch = EndWatch(*signal_and_lead(request.slurm.signal))
        meeting = Meeting(Path(self.run_dir), place)
        part: Part | None = None
        try:
            check_restarts(request, place)
            part = prepare(request, place, meeting, clean(environ))
            look = partial(look_around, Host(environ))
            on_hang = _say_hang if place.task == 0 else _say_nothing
            around = Around(PlainDisplay(), look, on_hang, (watch,), meeting.hangs)
            ended = attend(part, around)
        except FasttrainError as error:
            sys.stderr.write(f"{error}\n")
            ended = Ended(int(error.exit_code), 0.0, (error.what,))
        code = self._conclude(place, meeting, part, ended)
        if watch.warned:
            _requeue(request, place, ended.crash)
            # Reached only without a requeue, or on other tasks than the first. Those exit with 0,
            # or --kill-on-bad-exit would end the first one before it has requeued the job.
            code = 0 if place.task else code
        elif ended.crash and request.slurm.requeue.value:
            _say(f"not requeued: the run failed ({ended.crash.cause})")
        return _leave(code)

    def request(self) -> JobRequest:
        """Return the request that was sent.

        Raises:
            CodecError: If it was written by another version of fasttrain.
            OSError: If it can't be read.
        """
        return load(JobRequest, Path(self.run_dir, JOB_FILE))

    def checkpoint(self) -> DelayedSubmission | None:
        """Return the task for submitit to requeue; None if it was requeued often enough."""
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return DelayedSubmission(self) if restarts < self.request().slurm.requeue.value else None

    def _conclude(
        self, place: Allocation, meeting: Meeting, part: Part | None, ended: Ended
    ) -> int:
        """Record this task's end; the last task writes the receipt. Return the run's exit code."""
        # A crash that names a node is another task's, which records it itself.
        own = ended.crash and not ended.crash.node
        when_ns = ended.crash.time_ns if ended.crash and own else time.time_ns()
        ends = meeting.end(TaskEnd(place.task, ended.exit_code, when_ns))
        code = run_code(ends)
        if part and len(ends) == place.tasks:
            first, top = first_to_fail(ends), Path(self.run_dir)
            crash = _crash(top, first.task, part.plan) if first else None
            gather(
                part.masked,
                replace(ended, exit_code=code, crash=crash),
                run_dirs=[task_dir(top, task) for task in range(place.tasks)],
            )
        return code


def _crash(top: Path, task: int, plan: LaunchPlan) -> Crash | None:
    """Return the crash that a task recorded; None if its rank was ended from outside."""
    folder = task_dir(top, task)
    try:
        crash = load(Crash, folder / CRASH_FILE)
    except (OSError, CodecError):
        return None
    log = str((folder / crash.log_file).relative_to(top)) if crash.log_file else ""
    return replace(crash, ranks=plan.processes.value.world_size, log_file=log)


def _requeue(request: JobRequest, place: Allocation, crash: Crash | None) -> None:
    """Make submitit requeue the job: its handler of the warning signal does that, on one task."""
    times = request.slurm.requeue.value
    if place.task or not times:
        return
    if place.restarts >= times:
        _say(f"not requeued: it was {place.restarts} times")
        return
    if crash and is_hopeless(crash.cause):
        _say(f"not requeued: {crash.cause}: {Retry.NEVER}")
        return
    name, _ = signal_and_lead(request.slurm.signal)
    os.kill(os.getpid(), signal.Signals["SIG" + name])
    time.sleep(0)  # the handler runs here and ends this process


def is_hopeless(cause: str) -> bool:
    """Return True if a job would fail in the same way again.

    Not for ``interrupted``: SIGINT may be the warning signal.
    """
    return cause != "interrupted" and retry_of(cause) is Retry.NEVER


def _say_hang(hang: Hang) -> None:
    _say("\n  ".join((f"{NO_PROGRESS} for {hang.quiet_s:.0f} s", *hang.verdict)))


def _say(text: str) -> None:
    PlainDisplay().tell(text)


def _leave(code: int) -> int:
    """Return 0, or raise so that SLURM gets the run's exit code and submitit an error to store."""
    if code == 0:
        return 0
    # submitit pickles our exception and raises it again, at which Python would exit with 1.
    sys.excepthook = _say_nothing
    atexit.register(_exit_with, code)
    raise TaskFailedError(f"the run ended with exit code {code}")


def _exit_with(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_nothing(*_: Any) -> None:
    """Print nothing: task 0 reports hangs, and a failure is reported already."""
