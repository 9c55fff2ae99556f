"""What SLURM's own tools say of a cluster, as far as a job may fail on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartitionLimits:
    """A partition as ``scontrol show partition`` tells it.

    Attributes:
        name: Its name.
        state: ``UP``, or ``DOWN``, ``DRAIN`` or ``INACTIVE``.
        default: Whether jobs that name no partition go there.
        time_limit_min: Longest time of a job in minutes; None for no limit.
        nodes: Number of its nodes.
        max_nodes: Most nodes of a job; None for no limit.
    """

    name: str
    state: str
    default: bool = False
    time_limit_min: int | None = None
    nodes: int = 0
    max_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes of a partition that are alike.

    Attributes:
        partition: Name of the partition.
        state: SLURM's word, such as ``idle`` or ``drained``, without the mark behind it.
        count: How many they are.
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
    """What the user may use together, by the accounting.

    Attributes:
        account: Name of the account.
        partition: The partition that it is for; empty for all.
        qos: Names of the QOS that go with it.
    """

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The cluster; what couldn't be asked is empty, and told in `unread`.

    Attributes:
        partitions: All partitions that the user can see.
        nodes: Kinds of their nodes.
        associations: The user's; None where there is no accounting, or it couldn't be asked.
        accounting: Whether there is accounting; None where unknown.
        enforced: What of the accounting sbatch insists on: ``associations``, ``qos``, ...
        unread: What couldn't be asked, with the reason: ``partitions``, ``nodes``, ...
    """

    partitions: tuple[PartitionLimits, ...] = ()
    nodes: tuple[NodeKind, ...] = ()
    associations: tuple[Association, ...] | None = None
    accounting: bool | None = None
    enforced: frozenset[str] = frozenset()
    unread: tuple[tuple[str, str], ...] = ()
