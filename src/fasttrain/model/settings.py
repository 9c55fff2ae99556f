"""The options of a run: their types, defaults, help and limits, which are written only here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fasttrain.model.decision import PROCESSES, RUN, Setting, option
from fasttrain.model.levers import LeverOptions

HangAction = Literal["stop", "report"]
RestartOn = Literal["auto", "any"]
NanChoice = Literal["off", "warn", "stop"]
PreemptChoice = Literal["signal", "snapshot"]
PresetName = Literal["exact", "fast", "max"]


# Source: proc(5), /proc/sys/kernel/pid_max: at most 2^22 on 64-bit systems
MOST_PROCESSES = 1 << 22


@dataclass(frozen=True, slots=True)
class Settings(LeverOptions):
    """The options of a run. A field's name is its flag, with underscores."""

    nproc_per_node: Setting[int | None] = option(
        None, "Processes on this node; default: one per chosen GPU", panel=PROCESSES,
        metavar="N", minimum=1, maximum=MOST_PROCESSES,
    )  # fmt: skip
    nodes: Setting[str] = option(
        "1", "Number of nodes, or MIN:MAX for an elastic run", panel=PROCESSES, metavar="N|MIN:MAX"
    )
    node_rank: Setting[int | None] = option(
        None, "Rank of this node in a static run", panel=PROCESSES, metavar="RANK", minimum=0
    )
    master_addr: Setting[str | None] = option(
        None, "Address of node 0 in a static run", panel=PROCESSES, metavar="HOST"
    )
    master_port: Setting[int | None] = option(
        None, "Port on node 0; default on one node: any free one", panel=PROCESSES, metavar="PORT",
        minimum=1, maximum=65_535,
    )  # fmt: skip
    rdzv_endpoint: Setting[str | None] = option(
        None, "HOST[:PORT] of an elastic rendezvous", panel=PROCESSES, metavar="HOST:PORT"
    )
    rdzv_backend: Setting[str] = option(
        "c10d", "Rendezvous backend", panel=PROCESSES, metavar="NAME"
    )
    rdzv_id: Setting[str | None] = option(
        None, "Name that the nodes of one elastic run share", panel=PROCESSES, metavar="ID"
    )
    rdzv_conf: Setting[str | None] = option(
        None, "KEY=VALUE,... of an elastic rendezvous, such as last_call_timeout=10",
        panel=PROCESSES, metavar="KEY=VALUE",
    )  # fmt: skip
    max_restarts: Setting[int] = option(
        0, "Most restarts of a failed run", panel=PROCESSES, metavar="N", minimum=0
    )
    restart_on: Setting[RestartOn] = option(
        "auto", "Restart after recoverable failures, or after any", panel=PROCESSES
    )
    loader_workers: Setting[int | None] = option(
        None, "Worker processes for DataLoaders that have none; 0 to leave them so",
        panel=PROCESSES, metavar="N", minimum=0, maximum=MOST_PROCESSES,
    )  # fmt: skip
    show_ranks: Setting[str] = option(
        "0", "Ranks whose output is shown live: all | 0,3", panel=PROCESSES, metavar="RANKS"
    )

    shutdown_timeout: Setting[int] = option(
        30, "Seconds from SIGTERM, SIGHUP, or ctrl-C of several ranks to SIGKILL", panel=RUN,
        metavar="S", minimum=0,
    )  # fmt: skip
    debug: Setting[bool] = option(False, "Blocking launches and torch's debug switches", panel=RUN)
    env: Setting[tuple[str, ...]] = option(
        (), "Environment variable for the script; repeatable", panel=RUN, metavar="NAME=VALUE"
    )
    strict: Setting[bool] = option(
        False, "A lever that was asked for but did not take effect is an error", panel=RUN
    )
    max_steps: Setting[int | None] = option(
        None, "Stop after N optimizer steps", panel=RUN, metavar="N", minimum=1
    )
    hang_timeout: Setting[str] = option(
        "auto", "Time without progress that is a hang: auto | off | SECONDS", panel=RUN,
        metavar="SECONDS|off",
    )  # fmt: skip
    on_hang: Setting[HangAction] = option(
        "stop", "Stop a run that hangs, or report where it hangs and go on", panel=RUN
    )
    on_nan: Setting[NanChoice] = option(
        "warn", "When gradients or losses are NaN or Inf several steps in a row", panel=RUN
    )
    run_dir: Setting[str | None] = option(
        None, "Directory for this run's plan, events, logs and receipt", panel=RUN, metavar="DIR"
    )
    preempt: Setting[PreemptChoice] = option(
        "signal", "Pass SIGUSR2 to the script, or end the run after a snapshot", panel=RUN
    )
    snapshot_every: Setting[int | None] = option(
        None, "Minutes between snapshots, besides that at the signal", panel=RUN, metavar="MIN",
        minimum=1,
    )  # fmt: skip
    resume: Setting[str | None] = option(
        None, "Resume from the last snapshot of a run", panel=RUN, metavar="RUN_DIR"
    )
    python: Setting[str | None] = option(
        None, "Interpreter for the script; default: the active environment's, if it has torch",
        panel=RUN, metavar="PATH",
    )  # fmt: skip
    quiet: Setting[bool] = option(False, "Print only errors of fasttrain's own", panel=RUN)


OPTION_NAMES: tuple[str, ...] = tuple(f.name for f in fields(Settings))


# The options of ``fasttrain slurm``, declared as those of `Settings`, and facts of a cluster.


TaskMode = Literal["per-node", "per-gpu"]

RESOURCES, JOB, SENDING = "SLURM resources", "SLURM job", "How it is sent"


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """The options of ``fasttrain slurm`` besides those of a run, in SLURM's own terms."""

    gpus_per_node: Setting[int | None] = option(
        None, "GPUs on each node", panel=RESOURCES, metavar="N", minimum=0
    )
    cpus_per_task: Setting[int | None] = option(
        None, "CPUs of each task; default: the GPUs' share of the node", panel=RESOURCES,
        metavar="N", minimum=1,
    )  # fmt: skip
    tasks: Setting[TaskMode] = option(
        "per-node", "One task per node with a torchrun agent, or one per GPU with SLURM's ranks",
        panel=RESOURCES,
    )  # fmt: skip
    mem: Setting[str | None] = option(
        None, "Memory of each node, such as 64G; 0 for all of it", panel=RESOURCES, metavar="SIZE"
    )
    time: Setting[str | None] = option(
        None, "Time limit: minutes, HH:MM:SS or DAYS-HH:MM:SS", panel=RESOURCES, metavar="TIME"
    )
    partition: Setting[str | None] = option(
        None, "Partition", panel=RESOURCES, metavar="NAME"
    )  # fmt: skip
    account: Setting[str | None] = option(None, "Account", panel=RESOURCES, metavar="NAME")
    qos: Setting[str | None] = option(
        None, "Quality of service", panel=RESOURCES, metavar="NAME"
    )  # fmt: skip
    constraint: Setting[str | None] = option(
        None, "Features that the nodes must have", panel=RESOURCES, metavar="LIST"
    )
    reservation: Setting[str | None] = option(
        None, "Reservation", panel=RESOURCES, metavar="NAME"
    )  # fmt: skip
    exclude: Setting[str | None] = option(
        None, "Nodes to leave out", panel=RESOURCES, metavar="NODES"
    )
    nodelist: Setting[str | None] = option(
        None, "Nodes that the job must have", panel=RESOURCES, metavar="NODES"
    )
    exclusive: Setting[bool] = option(False, "Share the nodes with no other job", panel=RESOURCES)

    job_name: Setting[str | None] = option(
        None, "Name of the job; default: the script's", panel=JOB, metavar="NAME"
    )
    dependency: Setting[str | None] = option(
        None, "Jobs to wait for, such as afterok:1234", panel=JOB, metavar="LIST"
    )
    comment: Setting[str | None] = option(None, "Comment", panel=JOB, metavar="TEXT")
    mail_type: Setting[str | None] = option(
        None, "When to send mail, such as END,FAIL", panel=JOB, metavar="TYPES"
    )
    mail_user: Setting[str | None] = option(None, "Whom to send it to", panel=JOB, metavar="USER")
    signal: Setting[str] = option(
        "USR2@90", "Signal before the time limit, and how many seconds before", panel=JOB,
        metavar="SIGNAL@SECONDS",
    )  # fmt: skip
    requeue: Setting[int] = option(
        0, "Most requeues of a job that got that signal", panel=JOB, metavar="N", minimum=0
    )

    cluster: Setting[str | None] = option(
        None, "Profile in fasttrain.yaml, under slurm: clusters:", panel=SENDING, metavar="NAME"
    )
    setup: Setting[tuple[str, ...]] = option(
        (), "Shell line before the run, such as 'module load cuda'; repeatable", panel=SENDING,
        metavar="LINE",
    )  # fmt: skip
    sbatch: Setting[tuple[str, ...]] = option(
        (), "Any other option of sbatch; repeatable", panel=SENDING, metavar="OPTION=VALUE"
    )
    srun_args: Setting[tuple[str, ...]] = option(
        (), "Any other option of srun; repeatable", panel=SENDING, metavar="WORD"
    )
    python: Setting[str | None] = option(
        None, "Interpreter on the nodes; default: the one that runs fasttrain", panel=SENDING,
        metavar="PATH",
    )  # fmt: skip
    sweep: Setting[tuple[str, ...]] = option(
        (), "An option of the script and its values, or FROM:TO; repeatable", panel=SENDING,
        metavar="OPTION=VALUES",
    )  # fmt: skip
    parallel: Setting[int | None] = option(
        None, "Cells of a sweep that run at once; default: all", panel=SENDING, metavar="N",
        minimum=1,
    )  # fmt: skip


SLURM_OPTION_NAMES: tuple[str, ...] = tuple(f.name for f in fields(SlurmSettings))


@dataclass(frozen=True, slots=True)
class PartitionLimits:
    """A partition as ``scontrol show partition`` prints it.

    Attributes:
        name: Its name.
        state: ``UP``, or ``DOWN``, ``DRAIN`` or ``INACTIVE``.
        default: Whether jobs that name no partition go there.
        time_limit_min: Longest time of a job in minutes; None for no limit.
        nodes: Number of its nodes.
        max_nodes: Most nodes of one job; None for no limit.
    """

    name: str
    state: str
    default: bool = False
    time_limit_min: int | None = None
    nodes: int = 0
    max_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A set of equal nodes of a partition.

    Attributes:
        partition: Name of the partition.
        state: SLURM's word, such as ``idle`` or ``drained``, without a suffix such as ``*``.
        count: Number of the nodes.
        cpus: CPUs of each.
        memory_mb: Memory of each in MiB.
        gpus: GPUs of each.
    """

    partition: str
    state: str
    count: int
    cpus: int
    memory_mb: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Association:
    """An association of SLURM's accounting: an account that the user may charge.

    Attributes:
        account: Name of the account.
        partition: The partition that it is valid for; empty for all.
        qos: Names of the QOS that it allows.
    """

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The limits of a cluster that a job can violate; what couldn't be queried is empty.

    Attributes:
        partitions: All partitions that the user can see.
        nodes: Kinds of their nodes.
        associations: The user's; None without accounting, or if the query failed.
        accounting: Whether there is accounting; None if unknown.
        enforced: Parts of the accounting that sbatch enforces: ``associations``, ``qos``, ...
        unread: Failed queries, with the reason: ``partitions``, ``nodes``, ...
    """

    partitions: tuple[PartitionLimits, ...] = ()
    nodes: tuple[NodeKind, ...] = ()
    associations: tuple[Association, ...] | None = None
    accounting: bool | None = None
    enforced: frozenset[str] = frozenset()
    unread: tuple[tuple[str, str], ...] = ()
