"""What submitit calls in each task: completes the plan on the node, runs it, and tells its end."""

from __future__ import annotations

import atexit
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from submitit.helpers import DelayedSubmission

from fasttrain.config.environ import read_environ
from fasttrain.hardware.probe import probe_machine
from fasttrain.launch.display import PlainDisplay
from fasttrain.launch.invocation import read_invocation
from fasttrain.launch.preflight import find_program
from fasttrain.launch.receipts import gather
from fasttrain.launch.run_dir import RECEIPT_FILE, write_private
from fasttrain.launch.start import Ended, attend, compose, log_name
from fasttrain.planning.plan import make_plan
from fasttrain.planning.secrets import mask_plan
from fasttrain.planning.slurm import node_settings
from fasttrain.planning.slurm_values import signal_and_lead
from fasttrain.slurm.allocation import clean, rank_variables, read_allocation
from fasttrain.slurm.end_watch import EndWatch
from fasttrain.slurm.meeting import Meeting, choose_port, run_code
from fasttrain.slurm.secrets import unmasked
from fasttrain.spec.codec import dumps, loads
from fasttrain.spec.errors import ExitCode, FasttrainError
from fasttrain.spec.job import JOB_FILE, Allocation, JobRequest, TaskEnd, TaskStart
from fasttrain.spec.machine import Machine
from fasttrain.spec.plan import PLAN_FILE, LaunchPlan


class TaskFailedError(Exception):
    """The run ended with an exit code other than 0; submitit keeps it as this task's error."""


@dataclass
class NodeTask:
    """One task of a job; pickled by submitit, and so no more than the run directory.

    Attributes:
        run_dir: The run directory.
    """

    run_dir: str

    def __call__(self) -> int:
        """Run this task's part and give 0.

        Raises:
            TaskFailedError: The run failed; the process then ends with the run's own exit code.
        """
        environ = read_environ()
        place = read_allocation(environ)
        meeting = Meeting(Path(self.run_dir), place)
        watch: EndWatch | None = None
        try:
            request = unmasked(self.request(), environ)
            watch = EndWatch(*signal_and_lead(request.slurm.signal))
            _check_restarts(request, place)
            task = _prepare(request, place, meeting, clean(environ))
            ended = attend(task.plan, task.program, task.log, PlainDisplay(), watch)
        except FasttrainError as error:
            sys.stderr.write(f"{error}\n")
            ended, task = Ended(int(error.exit_code), 0.0, (error.what,)), None
        warned = bool(watch and watch.warned)
        ends = meeting.end(TaskEnd(ended.exit_code, time.time_ns(), warned or _was_stopped(watch)))
        code = run_code(ends)
        if task and len(ends) == place.tasks:
            gather(mask_plan(task.plan), code, ended.wall_s, ended.warnings)
        if warned:
            self._queue_again(request, place)
            code = 0 if place.task else code
        return _leave(code)

    def request(self) -> JobRequest:
        """Give what was sent.

        Raises:
            CodecError: It was written by another version of fasttrain.
            OSError: It can't be read.
        """
        return loads(JobRequest, Path(self.run_dir, JOB_FILE).read_bytes())

    def checkpoint(self) -> DelayedSubmission | None:
        """Give what submitit queues again; None where it was queued again often enough."""
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return DelayedSubmission(self) if restarts < self.request().slurm.requeue.value else None

    def _queue_again(self, request: JobRequest, place: Allocation) -> None:
        """Have submitit queue the job again, which its handler of the signal does on one task."""
        times = request.slurm.requeue.value
        if place.task or not times:
            return
        if place.restarts >= times:
            sys.stderr.write(f"fasttrain: not queued again: it was {place.restarts} times\n")
            return
        name, _ = signal_and_lead(request.slurm.signal)
        os.kill(os.getpid(), signal.Signals["SIG" + name])
        time.sleep(0)  # the handler runs here, and ends this process


@dataclass(frozen=True)
class _Task:
    plan: LaunchPlan
    program: tuple[str, Mapping[str, str]]
    log: str


def _prepare(
    request: JobRequest, place: Allocation, meeting: Meeting, environ: dict[str, str]
) -> _Task:
    os.chdir(request.cwd)
    machine = probe_machine(environ)
    port = request.settings.master_port.value or 0
    if not port and place.task == 0:
        port = choose_port(place.job_id)
    start = TaskStart(place.hosts[place.node_rank], port, _facts(machine))
    first = meeting.begin(start)
    plan = _plan(request, place, machine, first.port, environ)
    run_dir = Path(request.run_dir)
    write_private(run_dir / _plan_file(place), dumps(mask_plan(plan)))
    if place.task == 0:
        (run_dir / RECEIPT_FILE).unlink(missing_ok=True)  # of the attempt before
    for warning in plan.warnings if place.task == 0 else ():
        sys.stderr.write(f"fasttrain: warning: {warning}\n")
    environment = compose(environ, plan.environment)
    if plan.processes.value.backend == "slurm":
        environment |= rank_variables(place, first.port)
    program = find_program(plan, environment)
    log = log_name(plan) if place.task == 0 else f"task-{place.task}.log"
    return _Task(plan, (program, environment), log)


def _plan(
    request: JobRequest, place: Allocation, machine: Machine, port: int, environ: dict[str, str]
) -> LaunchPlan:
    settings = node_settings(request.settings, request.slurm, place, port)
    invocation = replace(
        read_invocation(request.target, settings, environ, request.facts),
        run_id=request.run_id,
        run_dir=request.run_dir,
        cwd=request.cwd,
        plan_file=_plan_file(place),
        ranks_by_slurm=request.slurm.tasks.value == "per-gpu",
        restart_count=place.restarts,
    )
    return make_plan(settings, machine, invocation)


def _plan_file(place: Allocation) -> str:
    return PLAN_FILE if place.task == 0 else f"plan-{place.task}.json"


def _facts(machine: Machine) -> dict[str, str]:
    """Give what must be the same on all nodes."""
    names: dict[str, int] = {}
    for device in machine.devices:
        names[device.name] = names.get(device.name, 0) + 1
    devices = ", ".join(f"{count} x {name}" for name, count in sorted(names.items()))
    return {
        "devices": devices or "no accelerator",
        "torch": machine.torch.version or "none",
        "Python": platform.python_version(),
    }


def _check_restarts(request: JobRequest, place: Allocation) -> None:
    """See that the job was not queued again more often than it may be.

    Raises:
        FasttrainError: It was, by SLURM itself, as it does after a dead node.
    """
    most = request.slurm.requeue.value + request.settings.max_restarts.value
    if place.restarts > most:
        raise FasttrainError(
            f"this job was queued again {place.restarts} times",
            why=f"--requeue and --max-restarts allow {most} together",
            fix="look into the logs for why, and send it anew with more of either",
            slug="restarts-exhausted",
            exit_code=ExitCode.CANNOT_START,
        )


def _was_stopped(watch: EndWatch | None) -> bool:
    return watch is not None and watch.stopped


def _leave(code: int) -> int:
    """Give 0, or leave so that SLURM gets the run's exit code and submitit an error to keep."""
    if code == 0:
        return 0
    # submitit raises our exception again behind the pickling, and Python would end with 1.
    sys.excepthook = _say_nothing
    atexit.register(_exit_with, code)
    raise TaskFailedError(f"the run ended with exit code {code}")


def _exit_with(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_nothing(*_: Any) -> None:
    """The card or the error is on the screen already."""
