"""The function that submitit calls in each task: run the task's part of the job, record its end."""

from __future__ import annotations

import atexit
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from submitit.helpers import DelayedSubmission
from submitit.slurm.slurm import SlurmJobEnvironment

from fasttrain.config.environ import read_environ
from fasttrain.files import load, write_private
from fasttrain.hardware.host import Host
from fasttrain.hardware.host_state import look_around
from fasttrain.hardware.probe import probe_machine
from fasttrain.launch.crash.cause_rules import Retry
from fasttrain.launch.crash.causes import retry_of
from fasttrain.launch.node_run import Ended, NodeRun, Observers
from fasttrain.launch.output.display import PlainDisplay
from fasttrain.launch.preflight import find_program
from fasttrain.launch.receipts import gather, took_the_signal
from fasttrain.launch.run_dir.lock import renew
from fasttrain.launch.run_dir.paths import secure_cache
from fasttrain.launch.run_node import attend, compose
from fasttrain.launch.start import read_invocation
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.crash import CRASH_FILE, Crash
from fasttrain.model.decision import Setting
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.hang import HEARTBEATS_VARIABLE, NO_PROGRESS, Hang
from fasttrain.model.job import (
    JOB_FILE,
    SECRETS_VARIABLE,
    Allocation,
    JobRequest,
    TaskEnd,
    TaskStart,
)
from fasttrain.model.machine import Machine
from fasttrain.model.plan import PLAN_FILE, LaunchPlan
from fasttrain.model.secrets import hide, mask_args, mask_value
from fasttrain.planning.explain import mask_plan
from fasttrain.planning.plan import make_plan
from fasttrain.planning.slurm_job import node_settings
from fasttrain.planning.slurm_values import signal_and_lead
from fasttrain.slurm.follow import EndWatch
from fasttrain.slurm.meeting import Meeting, choose_port, first_to_fail, run_code

# Keep a run's secrets out of its directory: the job's environment carries them to the nodes.


def masked(
    requests: Iterable[JobRequest], values: tuple[str, ...] = ()
) -> tuple[tuple[JobRequest, ...], dict[str, str]]:
    """Return the requests without their secrets, and the variable that carries them, if any.

    All tasks of a job array get the same environment, so one variable carries the secrets of all
    cells: each word once. A request holds the numbers of its own.

    Args:
        requests: The request of each cell.
        values: Known secrets, besides those that are recognised by name.
    """
    words: dict[str, int] = {}
    shown = tuple(_masked(request, values, words) for request in requests)
    return shown, {SECRETS_VARIABLE: json.dumps(list(words))} if words else {}


def unmasked(request: JobRequest, environ: Mapping[str, str]) -> JobRequest:
    """Return the request with its secrets, which the job's environment carries.

    Raises:
        ValueError: If something was masked, and the variable is missing or malformed.
    """
    try:
        words = [str(word) for word in json.loads(environ.get(SECRETS_VARIABLE) or "[]")]
        args = _filled(request.target.args, request.hidden_args, words)
        entries = _filled(request.settings.env.value, request.hidden_env, words)
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{SECRETS_VARIABLE} isn't whole in the job's environment") from error
    return replace(_with(request, args, entries), hidden_args={}, hidden_env={})


def _masked(request: JobRequest, values: tuple[str, ...], words: dict[str, int]) -> JobRequest:
    args = mask_args(request.target.args, values)
    entries = tuple(_mask_entry(entry, values) for entry in request.settings.env.value)
    sweep = request.slurm.sweep
    texts = tuple(hide(text, values) for text in sweep.value)
    return replace(
        _with(request, args, entries),
        # The nodes read neither of these two.
        slurm=replace(request.slurm, sweep=Setting(texts, sweep.source)),
        cell={name: hide(value, values) for name, value in request.cell.items()},
        hidden_args=_hidden(request.target.args, args, words),
        hidden_env=_hidden(request.settings.env.value, entries, words),
    )


def _mask_entry(entry: str, values: tuple[str, ...]) -> str:
    name, _, value = entry.partition("=")
    return f"{name}={mask_value(name, value, values)}"


def _hidden(own: Sequence[str], shown: Sequence[str], words: dict[str, int]) -> dict[str, int]:
    """Return the numbers of the words that were masked, by index; new ones are added to `words`."""
    return {
        str(index): words.setdefault(word, len(words))
        for index, (word, mask) in enumerate(zip(own, shown, strict=True))
        if word != mask
    }


def _filled(shown: Sequence[str], hidden: Mapping[str, int], words: list[str]) -> tuple[str, ...]:
    return tuple(
        words[hidden[str(index)]] if str(index) in hidden else word
        for index, word in enumerate(shown)
    )


def _with(request: JobRequest, args: tuple[str, ...], entries: tuple[str, ...]) -> JobRequest:
    settings = replace(request.settings, env=Setting(entries, request.settings.env.source))
    return replace(request, target=replace(request.target, args=args), settings=settings)


# Plan a task's part of a job, on its node.


PUT_ASIDE = "fasttrain: the records of the previous attempt are in"
# sbatch passes on the environment of the shell that submits. Variables of another launcher in it
# would give the script a wrong rank.
STRAY = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "FASTTRAIN_RUN_ID",
    "FASTTRAIN_RESTART_COUNT", HEARTBEATS_VARIABLE, SECRETS_VARIABLE, "SUBMITIT_EXECUTOR",
    "SUBMITIT_FOLDER", "SUBMITIT_PREEMPT_SIGNAL",
)  # fmt: skip


def task_dir(run_dir: Path, task: int) -> Path:
    """Return the directory of a task's own files: the run directory, or a folder in it.

    Each has the layout of a run directory, as on nodes that are started by hand, so that the
    launchers of several nodes never share files.
    """
    return run_dir / f"task-{task}" if task else run_dir


def prepare(
    request: JobRequest, place: Allocation, meeting: Meeting, environ: dict[str, str]
) -> NodeRun:
    """Return this task's part of the run, once all tasks have confirmed that their nodes are equal.

    Args:
        request: The request that was sent, with its secrets.
        place: The place of this task.
        meeting: Where the tasks meet.
        environ: The environment of the job, without variables of other launchers.

    Raises:
        FasttrainError: If the nodes differ, or the request contradicts them.
    """
    os.chdir(request.cwd)
    machine = probe_machine(environ)
    port = request.settings.master_port.value or 0
    if not port and place.task == 0:
        port = choose_port(place.job_id)
    first = meeting.begin(TaskStart(place.hosts[place.node_rank], port, _facts(machine)))
    plan = _plan(request, place, machine, first.port, environ)
    masked = mask_plan(plan, environ)
    run_dir = Path(plan.run_dir)
    if (aside := renew(run_dir, place.restarts)) and place.task == 0:
        sys.stderr.write(f"{PUT_ASIDE} {aside}\n")
    write_private(run_dir / PLAN_FILE, dumps(masked))
    for warning in plan.warnings if place.task == 0 else ():
        sys.stderr.write(f"fasttrain: warning: {warning}\n")
    environment = compose(environ, plan.environment)
    for warning in secure_cache(plan, environment):
        sys.stderr.write(f"fasttrain: warning: {warning}\n")
    if plan.processes.value.backend == "slurm":
        environment |= rank_variables(place, first.port)
    return NodeRun(plan, masked, find_program(plan, environment), environ, environment, place.task)


def _plan(
    request: JobRequest, place: Allocation, machine: Machine, port: int, environ: dict[str, str]
) -> LaunchPlan:
    settings = node_settings(request.settings, request.slurm, place, port)
    invocation = replace(
        read_invocation(request.target, settings, environ, request.facts),
        run_id=request.run_id,
        run_dir=str(task_dir(Path(request.run_dir), place.task)),
        cwd=request.cwd,
        ranks_by_slurm=request.slurm.tasks.value == "per-gpu",
        restart_count=place.restarts,
        warning=f"SIG{signal_and_lead(request.slurm.signal)[0]}",
    )
    return replace(make_plan(settings, machine, invocation), shared_dir=request.run_dir)


def _facts(machine: Machine) -> dict[str, str]:
    """Return the facts that must be equal on all nodes."""
    names = Counter(device.name for device in machine.devices)
    devices = ", ".join(f"{count} x {name}" for name, count in sorted(names.items()))
    return {
        "devices": devices or "no accelerator",
        "torch": machine.torch.version or "none",
        "Python": platform.python_version(),
    }


def check_restarts(request: JobRequest, place: Allocation) -> None:
    """Check that the job was not requeued more often than it may be.

    Raises:
        FasttrainError: ``restarts-exhausted`` if it was; SLURM itself requeues after a node fails.
    """
    most = request.slurm.requeue.value + request.settings.max_restarts.value
    if place.restarts > most:
        raise FasttrainError(
            f"this job was requeued {place.restarts} times",
            why=f"--requeue and --max-restarts together allow {most}",
            fix="see the logs for the cause, and send it again with more of either",
            slug="restarts-exhausted",
            exit_code=ExitCode.CANNOT_START,
        )


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """Return the place of this task, for a process that srun started.

    Source: srun(1), SLURM 22.05, "OUTPUT ENVIRONMENT VARIABLES".
    """
    place = SlurmJobEnvironment()
    granted = environ.get("SLURM_GPUS_ON_NODE", "")
    return Allocation(
        job_id=place.job_id,
        hosts=tuple(place.hostnames),
        node_rank=place.node,
        task=place.global_rank,
        local_task=place.local_rank,
        tasks=place.num_tasks,
        gpus=int(granted) if granted.isdecimal() else 0,
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
    )


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables of other launchers and of fasttrain itself."""
    return {name: value for name, value in environ.items() if name not in STRAY}


def rank_variables(place: Allocation, port: int) -> dict[str, str]:
    """Return the variables from which torch reads its rank, for a task that is one worker.

    Source: the documentation of torchrun, torch 2.13, "Environment Variables".
    """
    per_node = place.tasks // len(place.hosts)
    return {
        "RANK": str(place.task),
        "LOCAL_RANK": str(place.local_task),
        "GROUP_RANK": str(place.node_rank),
        "WORLD_SIZE": str(place.tasks),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_WORLD_SIZE": str(len(place.hosts)),
        "MASTER_ADDR": place.hosts[0],
        "MASTER_PORT": str(port),
    }


# The function that submitit calls in each task: run the task's part of the job, record its end.


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
        part: NodeRun | None = None
        try:
            check_restarts(request, place)
            part = prepare(request, place, meeting, clean(environ))
            look = partial(look_around, Host(environ))
            on_hang = _say_hang if place.task == 0 else _say_nothing
            observers = Observers(PlainDisplay(), look, on_hang, (watch,), meeting.hangs)
            ended = attend(part, observers)
        except FasttrainError as error:
            sys.stderr.write(f"{error}\n")
            ended = Ended(int(error.exit_code), 0.0, (error.what,))
        code = self._conclude(place, meeting, part, ended)
        if watch.warned and _is_over(request, code, Path(self.run_dir)):
            if request.slurm.requeue.value and not place.task:
                _say("not requeued: the run ended by itself, and has nothing to resume")
        elif watch.warned:
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
        self, place: Allocation, meeting: Meeting, part: NodeRun | None, ended: Ended
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


def _is_over(request: JobRequest, code: int, run_dir: Path) -> bool:
    """Return True if a run ended well although it was warned, and not to be resumed.

    With snapshots the signal ends a run with PREEMPTED, unless it comes too late for that. A script
    that handles the signal itself may have saved, and ends with 0 as well.
    """
    with_snapshots = request.settings.preempt.value == "snapshot"
    return code == 0 and with_snapshots and took_the_signal(run_dir)


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
