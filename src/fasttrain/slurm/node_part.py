"""Completes the plan of a job on one of its nodes."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from fasttrain.files.writing import write_private
from fasttrain.hardware.probe import probe_machine
from fasttrain.launch.node_run import Part
from fasttrain.launch.preflight import find_program
from fasttrain.launch.run_dir.lock import renew
from fasttrain.launch.run_dir.paths import secure_cache
from fasttrain.launch.run_node import compose
from fasttrain.launch.start import read_invocation
from fasttrain.model.codec import dumps
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import Allocation, JobRequest, TaskStart
from fasttrain.model.machine import Machine
from fasttrain.model.plan import PLAN_FILE, LaunchPlan
from fasttrain.planning.plan import make_plan
from fasttrain.planning.secrets import mask_plan
from fasttrain.planning.slurm.job import node_settings
from fasttrain.planning.slurm.values import signal_and_lead
from fasttrain.slurm.allocation import rank_variables
from fasttrain.slurm.meeting import Meeting, choose_port

PUT_ASIDE = "fasttrain: what the attempt before has told is in"


def task_dir(run_dir: Path, task: int) -> Path:
    """Return the directory of a task's own files: that of the run, or one in it.

    Each is a run directory like that of a node that was started by hand, so that launchers of
    several nodes never meet each other's files.
    """
    return run_dir / f"task-{task}" if task else run_dir


def prepare(
    request: JobRequest, place: Allocation, meeting: Meeting, environ: dict[str, str]
) -> Part:
    """Return what this task runs, once all tasks have shown that their nodes are alike.

    Args:
        request: What was sent, with its secrets.
        place: The place of this task.
        meeting: Where the tasks meet.
        environ: The environment of the job, without what other launchers left in it.

    Raises:
        FasttrainError: The nodes differ, or the request contradicts them.
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
    return Part(plan, masked, find_program(plan, environment), environ, environment, place.task)


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
    return make_plan(settings, machine, invocation)


def _facts(machine: Machine) -> dict[str, str]:
    """Return what must be the same on all nodes."""
    names = Counter(device.name for device in machine.devices)
    devices = ", ".join(f"{count} x {name}" for name, count in sorted(names.items()))
    return {
        "devices": devices or "no accelerator",
        "torch": machine.torch.version or "none",
        "Python": platform.python_version(),
    }


def check_restarts(request: JobRequest, place: Allocation) -> None:
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
