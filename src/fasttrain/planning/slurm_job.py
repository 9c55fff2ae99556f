"""Makes the parameters of a SLURM job, and the settings of its nodes, from the user's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

from fasttrain.model.decision import Setting
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import Allocation, JobParameters, NodeShape, Row
from fasttrain.model.settings import Settings, SlurmSettings
from fasttrain.planning.describe import BUILT_IN, SLURM
from fasttrain.planning.slurm_values import MOST_CELLS, plain, signal_and_lead, time_min

# Options that have the same name in submitit.
_AS_THEY_ARE = (
    "partition", "account", "qos", "mem", "constraint", "exclude", "nodelist", "dependency",
    "comment", "mail_type", "mail_user",
)  # fmt: skip
# Options of a run that make no sense when SLURM chooses the nodes.
DECIDED_BY_SLURM = (
    "gpus", "node_rank", "master_addr", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "rdzv_conf",
)  # fmt: skip
_NODES = re.compile(r"[1-9][0-9]{0,5}")
# Options that the plan depends on: given by --sbatch, they could contradict it.
_OURS = frozenset(
    {"array", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output",
     "signal", "time", "wrap", "gpus-per-node", "cpus-per-task", "export", "requeue", "no-requeue"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Job:
    settings: Settings
    slurm: SlurmSettings
    name: str
    shape: NodeShape | None
    nodes: int
    tasks_per_node: int


def job_parameters(
    settings: Settings, slurm: SlurmSettings, name: str, shape: NodeShape | None
) -> JobParameters:
    """Return the parameters for submitit; a pure function, so it works without SLURM.

    Args:
        settings: The settings of the run.
        slurm: The settings of the job.
        name: The job's name if the user gave none.
        shape: A node of the partition, for the number of CPUs per GPU; None if unknown.

    Raises:
        FasttrainError: ``slurm-nodes``, ``slurm-tasks``, ``slurm-value``, ``slurm-time``,
            ``slurm-signal``, ``slurm-sbatch``, or ``slurm-option``.
    """
    _check_options(settings)
    nodes = _nodes(settings.nodes)
    _check_there(nodes, settings.nodes, slurm, shape)
    job = _Job(settings, slurm, name, shape, nodes, _tasks_per_node(settings, slurm))
    rows = tuple(row for part in _PARTS for row in part(job))
    python, limit = slurm.python.value, time_min(slurm.time)
    return JobParameters(
        submitit=_for_submitit(settings, slurm, rows, limit),
        nodes=nodes,
        time_min=limit,
        requeue=slurm.requeue.value,
        python=quote(plain("--python", python)) if python else None,
        rows=(*rows, *_other_rows(job, limit)),
        warnings=tuple(_warnings(job)),
    )


_EXTRA = frozenset({"reservation"})  # submitit has no parameter of its own for these
_COUNTS = frozenset({"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"})


def _for_submitit(
    settings: Settings, slurm: SlurmSettings, rows: tuple[Row, ...], limit: int | None
) -> dict[str, Any]:
    """Return the parameters under submitit's names."""
    signal, lead_s = signal_and_lead(slurm.signal)
    parameters: dict[str, Any] = {
        row.name.replace("-", "_"): int(row.value) if row.name in _COUNTS else row.value
        for row in rows
        if row.name not in _EXTRA
    }
    extra: dict[str, Any] = {row.name: row.value for row in rows if row.name in _EXTRA}
    extra |= _own_sbatch(slurm) | {"signal": f"{signal}@{lead_s}"}
    requeues = slurm.requeue.value + settings.max_restarts.value
    # Said in both cases: whether SLURM requeues by default is up to the cluster (JobRequeue).
    extra |= {"requeue": True} if requeues else {"no-requeue": True}
    if slurm.sweep.value:
        # submitit's own default is 256 at once.
        parameters["array_parallelism"] = slurm.parallel.value or MOST_CELLS
    parameters |= {
        "signal_delay_s": lead_s,
        "additional_parameters": extra,
        # submitit reacts to the signal that this variable names.
        "setup": [f"export SUBMITIT_PREEMPT_SIGNAL={signal}", *slurm.setup.value],
        "srun_args": [*_srun(parameters), *slurm.srun_args.value],
    }
    if limit is not None:
        parameters["time"] = limit
    if slurm.exclusive.value:
        parameters["exclusive"] = True
    return parameters


def _nodes(setting: Setting[str]) -> int:
    if _NODES.fullmatch(setting.value):
        return int(setting.value)
    raise FasttrainError(
        f"--nodes {setting.value!r} is not a number of nodes",
        why="SLURM grants a fixed number of nodes, so a run can't be elastic (MIN:MAX) there",
        fix="write it like --nodes 2",
        slug="slurm-nodes",
        exit_code=ExitCode.USAGE,
    )


def _check_there(
    nodes: int, setting: Setting[str], slurm: SlurmSettings, shape: NodeShape | None
) -> None:
    """Raise ``slurm-nodes`` if the partition has fewer nodes.

    SLURM would accept such a job, which then waits for ever.
    """
    if shape is None or nodes <= shape.nodes:
        return
    where = f"partition {slurm.partition.value}" if slurm.partition.value else "partition"
    gpus = slurm.gpus_per_node.value
    fitting = f" with {gpus} GPUs or more" if gpus else ""
    raise FasttrainError(
        f"{setting.source} {nodes} is more than there are",
        why=f"the {where} has {shape.nodes} nodes{fitting}, and SLURM would let the job wait for"
        " ever",
        fix=f"use --nodes {shape.nodes} or fewer, or another --partition",
        slug="slurm-nodes",
    )


def _check_options(settings: Settings) -> None:
    """Raise ``slurm-option`` if an option is given that SLURM decides."""
    for name in DECIDED_BY_SLURM:
        setting: Setting[Any] = getattr(settings, name)
        if setting.source.explicit and setting.value is not None:
            fix = "leave it out" if name != "gpus" else "use --gpus-per-node with their number"
            raise FasttrainError(
                f"{setting.source} can't be used with fasttrain slurm",
                why="SLURM chooses the nodes and their GPUs, and the ranks meet at the first node",
                fix=fix,
                slug="slurm-option",
            )

    if settings.resume.value:
        raise FasttrainError(
            "--resume can't be used with fasttrain slurm",
            why="a job resumes from its snapshots when it is queued again, in its own directory",
            fix="submit it with --preempt snapshot and --requeue N, or use fasttrain run --resume"
            " in an allocation",
            slug="slurm-option",
        )


def _tasks_per_node(settings: Settings, slurm: SlurmSettings) -> int:
    if slurm.tasks.value == "per-node":
        return 1
    count = settings.nproc_per_node.value or slurm.gpus_per_node.value
    if count:
        return count
    raise FasttrainError(
        "--tasks per-gpu needs a number of GPUs",
        why="it starts one task for each GPU, and their number on a node is not given",
        fix="add --gpus-per-node N, or --nproc-per-node N on a CPU",
        slug="slurm-tasks",
    )


def _identity(job: _Job) -> Iterator[Row]:
    name = job.slurm.job_name
    reason = "asked for" if name.value else "the script's name"
    yield Row("job-name", plain("--job-name", name.value or job.name), reason, name.source)


def _resources(job: _Job) -> Iterator[Row]:
    nodes, gpus = job.settings.nodes, job.slurm.gpus_per_node
    yield Row("nodes", str(job.nodes), _asked(nodes), nodes.source)
    reason = "one torchrun agent on each node"
    if job.slurm.tasks.value == "per-gpu":
        reason = "one task for each GPU, with SLURM's own ranks"
    yield Row("ntasks-per-node", str(job.tasks_per_node), reason, job.slurm.tasks.source)
    if gpus.value:
        yield Row("gpus-per-node", str(gpus.value), _asked(gpus), gpus.source)
    yield from _cpus(job)


def _cpus(job: _Job) -> Iterator[Row]:
    setting, gpus, shape = job.slurm.cpus_per_task, job.slurm.gpus_per_node.value or 0, job.shape
    if setting.value is not None:
        yield Row("cpus-per-task", str(setting.value), _asked(setting), setting.source)
    elif shape and gpus and shape.gpus >= gpus:
        share = shape.cpus // shape.gpus * gpus // job.tasks_per_node
        reason = (
            f"{shape.cpus} CPUs for the {shape.gpus} GPUs of a node;"
            f" SLURM's default is 1, which the workers would share"
        )
        yield Row("cpus-per-task", str(max(1, share)), reason, SLURM)
    elif (workers := job.settings.nproc_per_node.value or 1) > 1 == job.tasks_per_node:
        reason = "one for each worker; SLURM's default is 1, which they would share"
        yield Row("cpus-per-task", str(workers), reason, BUILT_IN)


def _named(job: _Job) -> Iterator[Row]:
    for name in (*_AS_THEY_ARE, "reservation"):
        setting: Setting[str | None] = getattr(job.slurm, name)
        if setting.value is not None:
            flag = "--" + name.replace("_", "-")
            yield Row(flag[2:], plain(flag, setting.value), _asked(setting), setting.source)


_PARTS = (_identity, _resources, _named)


def _asked(setting: Setting[Any]) -> str:
    return "asked for" if setting.source.explicit else "the default"


def _srun(parameters: dict[str, Any]) -> list[str]:
    # By default srun keeps the other ranks waiting for a dead one until the time limit.
    words = ["--kill-on-bad-exit=1"]
    if cpus := parameters.get("cpus_per_task"):
        # Since SLURM 22.05 srun doesn't inherit it from sbatch. Source: its release notes.
        words.append(f"--cpus-per-task={cpus}")
    return words


def _own_sbatch(slurm: SlurmSettings) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in slurm.sbatch.value:
        name, _, value = text.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if name in _OURS:
            raise FasttrainError(
                f"--sbatch {name}=... can't be given",
                why="it would contradict what fasttrain itself writes there",
                fix=f"use --{name} of fasttrain slurm, or leave it out",
                slug="slurm-sbatch",
            )
        options[name] = plain(f"--sbatch {name}", value) if value else True
    return options


def _other_rows(job: _Job, limit: int | None) -> Iterator[Row]:
    """Yield rows for what is not a plain parameter of submitit."""
    slurm, restarts = job.slurm, job.settings.max_restarts
    signal, lead_s = signal_and_lead(slurm.signal)
    reason = "the partition's own limit" if limit is None else _asked(slurm.time)
    yield Row("time", "" if limit is None else f"{limit} min", reason, slurm.time.source)
    reason = f"{lead_s} s to save before the end"
    yield Row("signal", f"{signal}@{lead_s}", reason, slurm.signal.source)
    if slurm.requeue.value:
        reason = "queued again after the warning signal"
        yield Row("requeue", str(slurm.requeue.value), reason, slurm.requeue.source)
    if restarts.value:
        yield Row("max-restarts", str(restarts.value), "also after a dead node", restarts.source)
    if slurm.sweep.value:
        reason = _asked(slurm.parallel) if slurm.parallel.value else "as many as are submitted"
        most = str(slurm.parallel.value or MOST_CELLS)
        yield Row("parallel", most, reason, slurm.parallel.source)
    yield Row("kill-on-bad-exit", "1", "one dead rank ends the job in seconds", BUILT_IN)


def _warnings(job: _Job) -> Iterator[str]:
    if job.shape is None and job.slurm.gpus_per_node.value and not job.slurm.cpus_per_task.value:
        yield (
            "The number of CPUs per GPU is unknown here, and SLURM's default is 1 per task:"
            " set it with --cpus-per-task."
        )
    if job.slurm.parallel.value and not job.slurm.sweep.value:
        yield f"{job.slurm.parallel.source} has no effect without --sweep."


# The settings of each node.


def node_settings(
    settings: Settings, slurm: SlurmSettings, allocation: Allocation, port: int
) -> Settings:
    """Return the settings of ``fasttrain run`` on one node, with SLURM's decisions in them.

    Args:
        settings: The settings of the run.
        slurm: The settings of the job.
        allocation: The nodes, and the place of this task.
        port: Port of the rendezvous on the first node.
    """
    changes: dict[str, Any] = {"nodes": Setting(str(len(allocation.hosts)), SLURM)}
    if len(allocation.hosts) > 1:
        changes |= {
            "node_rank": Setting(allocation.node_rank, SLURM),
            "master_addr": Setting(allocation.hosts[0], SLURM),
            "master_port": Setting(port, SLURM),
        }
    if slurm.gpus_per_node.value and settings.device.value != "cpu":
        changes["gpus"] = Setting("all", slurm.gpus_per_node.source)
    if settings.python.value:  # this process runs in that Python already
        changes["python"] = Setting(None, SLURM)
    return replace(settings, **changes)
