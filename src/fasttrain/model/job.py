"""A run on SLURM: the request that is sent, and the records that its tasks write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fasttrain.model.decision import Source
from fasttrain.model.errors import demand, demand_exit_code
from fasttrain.model.machine import DeviceProcess
from fasttrain.model.plan import ScriptFacts, Target
from fasttrain.model.settings import Settings, SlurmSettings

JOB_SCHEMA = 1
JOB_FILE = "job.json"  # in the run directory: a `JobRequest`
SUBMITTED_FILE = "submitted.json"  # a `SubmittedJob`
SUBMITIT_FOLDER = "slurm"  # submitit's own files, and SLURM's logs
TASKS_FOLDER = "tasks"  # `TaskStart` and `TaskEnd` of each task, by attempt
YEAR_9999_S = 253_370_764_800  # since the epoch; Python has no later dates
SECRETS_VARIABLE = "FASTTRAIN_JOB_SECRETS"  # a list of the secret words of all cells


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One run as it is sent to the cluster; its plan is made on the nodes.

    Attributes:
        run_id: Unique name of the run.
        run_dir: Absolute run directory, on a file system that the nodes share.
        target: What to start; secret arguments are masked.
        cwd: Working directory.
        settings: Options of the run; secret values of ``env`` are masked.
        slurm: Options of SLURM.
        facts: Facts from the source of the script.
        version: Version of fasttrain that sent it.
        cell: For a cell of a sweep, the script's options of this cell.
        hidden_args: Numbers of the masked arguments in `SECRETS_VARIABLE`, by index.
        hidden_env: The same of the masked entries of ``env``.
    """

    run_id: str
    run_dir: str
    target: Target
    cwd: str
    settings: Settings
    slurm: SlurmSettings
    facts: ScriptFacts
    version: str
    cell: dict[str, str] = field(default_factory=dict)
    hidden_args: dict[str, int] = field(default_factory=dict)
    hidden_env: dict[str, int] = field(default_factory=dict)
    schema: int = JOB_SCHEMA


@dataclass(frozen=True, slots=True)
class NodeShape:
    """The nodes of a partition; where they differ, the smallest of them.

    Attributes:
        cpus: CPUs of a node.
        gpus: GPUs of a node.
        nodes: Nodes of the partition that have as many GPUs as the job asks for.
    """

    cpus: int
    gpus: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter of a job as ``--dry-run`` prints it: name, value, reason and source."""

    name: str
    value: str
    reason: str
    source: Source


@dataclass(frozen=True, slots=True)
class JobParameters:
    """The parameters of a job that submitit sends.

    Attributes:
        submitit: Parameters of its `SlurmExecutor`, by its own names.
        nodes: Number of nodes.
        time_min: Time limit in minutes; None for the partition's own.
        requeue: How often the job may be requeued after its warning signal.
        python: Interpreter on the nodes, as a shell word; None for this one.
        rows: The same parameters, for display.
        warnings: What the user should know before the job is sent, one sentence each.
    """

    submitit: dict[str, Any]
    nodes: int
    time_min: int | None
    requeue: int
    python: str | None
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job that SLURM accepted.

    Attributes:
        job_id: Number of the job; of the job array for a sweep.
        run_id: Name of the run.
        run_dir: Its directory.
        command: The equivalent command line, secrets masked.
        submitted_s: When it was sent, in seconds since the epoch.
        nodes: Number of nodes.
        cells: Run directories of the cells of a sweep, in the order of the array; else empty.
    """

    job_id: str
    run_id: str
    run_dir: str
    command: str
    submitted_s: float
    nodes: int
    cells: tuple[str, ...] = ()
    schema: int = JOB_SCHEMA

    def __post_init__(self) -> None:
        demand(self.job_id.isdecimal(), "a job has a number")
        demand(0 <= self.submitted_s < YEAR_9999_S, f"{self.submitted_s} is no time")
        demand(not any("\0" in cell for cell in self.cells), "no file can have NUL in its name")


@dataclass(frozen=True, slots=True)
class Allocation:
    """The place of this task in its job, from SLURM's variables.

    Attributes:
        job_id: Number of the job; of the element in a job array.
        hosts: Names of the nodes, in the order of their ranks.
        node_rank: Rank of this node.
        task: Rank of this task among all tasks of the job.
        local_task: Rank of this task on its node.
        tasks: Number of tasks.
        gpus: GPUs that SLURM granted on this node; 0 if it names none.
        restarts: How often the job was requeued.
    """

    job_id: str
    hosts: tuple[str, ...]
    node_rank: int
    task: int
    local_task: int
    tasks: int
    gpus: int
    restarts: int


@dataclass(frozen=True, slots=True)
class TaskStart:
    """The record with which a task announces itself to the others before anything starts.

    Attributes:
        host: Name of the node.
        port: On the first task, the port of the ranks' rendezvous; 0 on others.
        facts: Facts that must be equal on all nodes, in words, by topic.
    """

    host: str
    port: int
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How a task ended.

    Attributes:
        task: Rank of the task among all tasks of the job.
        exit_code: Exit code of the script, or 128 + signal.
        ended_ns: When it failed, if a rank recorded that, else when it ended; in nanoseconds since
            the epoch, by the node's clock.
    """

    task: int
    exit_code: int
    ended_ns: int

    def __post_init__(self) -> None:
        demand_exit_code(self.exit_code)


RunState = Literal["running", "orphaned", "finished"]


@dataclass(frozen=True, slots=True)
class LocalRun:
    """One run on this machine.

    Attributes:
        run_id: Its name.
        state: ``running`` while its launcher lives, between two attempts too; ``orphaned`` if the
            launcher was killed; ``finished`` if the run ended but the script left processes behind.
        started_s: When the first of its processes started, in seconds since the epoch.
        processes: Its live processes without the launcher, and the device memory that each holds.
        run_dir: Its directory; empty if unknown.
        launcher: Process ID of the launcher; 0 if there is none, or on a node of SLURM.
    """

    run_id: str
    state: RunState
    started_s: float
    processes: tuple[DeviceProcess, ...]
    run_dir: str = ""
    launcher: int = 0

    @property
    def memory_bytes(self) -> int:
        """Device memory that the run holds; 0 if unknown."""
        return sum(process.memory_bytes for process in self.processes)
