"""What a cluster was asked to be, and what its nodes are."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_cluster.tools import ClusterError

Gres = list[tuple[str, int]]


@dataclass(frozen=True)
class Options:
    """A cluster that was asked for; times in seconds."""

    nodes: int
    gpus: int
    gres: list[str] = field(default_factory=list)
    cpus: int = 64
    mem_mb: int = 512000
    prefix: str = "node"
    cluster_name: str = "test"
    net: str = "auto"
    accounting: str = "yes"
    kill_wait: int = 5
    grace_time: int = 30
    requeue_delay: int = 5
    slurmd_timeout: int = 300

    def __post_init__(self) -> None:
        if self.requeue_delay < 5:
            raise ClusterError("--requeue-delay: slurmctld takes less than 5 for 120")

    @property
    def resources(self) -> Gres:
        """Return each pretended resource of a node, with its count."""
        pairs = [("gpu", self.gpus)] if self.gpus else []
        for text in self.gres:
            name, _, count = text.partition(":")
            pairs.append((name, int(count or 1)))
        return pairs


@dataclass(frozen=True)
class Node:
    """One node: `host` is the host name that it has, `link` its end at the bridge."""

    name: str
    host: str
    addr: str
    port: int
    link: str = ""


@dataclass(frozen=True)
class Controller:
    """Where the daemons of the whole cluster listen."""

    host: str
    addr: str
    port: int
    dbd_port: int
