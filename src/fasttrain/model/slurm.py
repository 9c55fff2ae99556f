"""The options of ``fasttrain slurm``, declared as those of `Settings`, and facts of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fasttrain.model.decision import Setting, option

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
