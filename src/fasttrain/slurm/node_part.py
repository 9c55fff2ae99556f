"""Plan a task's part of a job, on its node."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from submitit.slurm.slurm import SlurmJobEnvironment

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
from fasttrain.model.hang import PULSES_VARIABLE
from fasttrain.model.job import SECRETS_VARIABLE, Allocation, JobRequest, TaskStart
from fasttrain.model.machine import Machine
from fasttrain.model.plan import PLAN_FILE, LaunchPlan
from fasttrain.planning.plan import make_plan
from fasttrain.planning.secrets import mask_plan
from fasttrain.planning.slurm.node import node_settings
from fasttrain.planning.slurm.values import signal_and_lead
from fasttrain.slurm.meeting import Meeting, choose_port

PUT_ASIDE = "fasttrain: the records of the previous attempt are in"
# sbatch passes on the environment of the shell that submits. Variables of another launcher in it
# would give the script a wrong rank.
STRAY = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "FASTTRAIN_RUN_ID",
    "FASTTRAIN_RESTART_COUNT", PULSES_VARIABLE, SECRETS_VARIABLE, "SUBMITIT_EXECUTOR",
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
) -> Part:
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
