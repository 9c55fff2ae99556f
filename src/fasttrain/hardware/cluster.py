"""SLURM as seen from here: its partitions, and the job that this process runs in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.model.examination import Cluster, Partition
from fasttrain.model.job import NodeShape

SINFO_TIMEOUT_S = 2.0

# Partition (with a star when it is the default), availability, time limit, nodes by state, GRES.
# Source: sinfo(1), SLURM 24.11; by src/sinfo/sinfo.c mixed and completing nodes are allocated.
FORMAT = "%P|%a|%l|%F|%G"

# What SLURM's tools end with on a machine with the package alone, and in a shell of a cluster's
# node without its SLURM_CONF or SLURM_CONF_SERVER. Recorded from SLURM's sinfo.
_UNCONFIGURED = "Could not establish a configuration source"

_LINE = re.compile(r"(\S+?)(\*?)\|(\w+)\|([^|]+)\|(\d+)/(\d+)/(\d+)/(\d+)\|(.*)")
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,(]+)*:(\d+)")


def find_cluster(host: Host, *, timeout_s: float = SINFO_TIMEOUT_S) -> Cluster:
    """Return the cluster; an empty one where SLURM is not installed."""
    job = host.environ.get("SLURM_JOB_ID", "")
    gpus = job_gpus(host.environ) if job else ()
    tool = host.which("sinfo")
    if not tool:
        return Cluster(job=job, job_gpus=gpus)
    version, error, partitions, configured = "", "", tuple[Partition, ...](), True
    try:
        # It needs no controller, and is printed as "slurm 24.11.3".
        version = run_tool([tool, "--version"], timeout_s=timeout_s).strip().removeprefix("slurm ")
        partitions = parse_sinfo(run_tool([tool, "-h", "-o", FORMAT], timeout_s=timeout_s))
    except ToolError as caught:
        error, configured = str(caught), _UNCONFIGURED not in caught.said
    except ValueError as caught:
        error = str(caught)
    return Cluster(version, partitions, error, job, gpus, configured)


def job_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of the job's step on this node, or of the whole job where it has no step."""
    listed = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS", "")
    return tuple(gpu for gpu in listed.split(",") if gpu)


def parse_sinfo(text: str) -> tuple[Partition, ...]:
    """Read what ``sinfo -h -o FORMAT`` printed: one line for each partition and kind of node.

    Raises:
        ValueError: A line has another form.
    """
    partitions: dict[str, Partition] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"sinfo printed a line that fasttrain can't read: {line[:80]}")
        name, star, availability, time, *counts, gres = found.groups()
        allocated, idle, _, nodes = map(int, counts)
        before = partitions.get(name, Partition(name, 0, 0))
        partitions[name] = Partition(
            name=name,
            nodes=before.nodes + nodes,
            nodes_up=before.nodes_up + (allocated + idle if availability == "up" else 0),
            gpus_per_node=max(before.gpus_per_node, gpus_of(gres)),
            time_limit_min=time_limit_min(time),
            default=bool(star),
        )
    return tuple(partitions.values())


def gpus_of(gres: str) -> int:
    """Return the GPUs of a node by its GRES, such as ``gpu:a100:8(S:0-1),shard:32``."""
    return sum(int(count) for count in _GPUS.findall(gres))


def time_limit_min(text: str) -> int | None:
    """Return a time limit such as ``1-12:00:00`` or ``30:00`` in minutes; None for no limit.

    Raises:
        ValueError: It has another form.
    """
    if text == "infinite":
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"sinfo printed a time limit that fasttrain can't read: {text[:40]}")
    days, hours, minutes, _ = (int(part or 0) for part in found.groups())
    return days * 24 * 60 + hours * 60 + minutes


# The nodes of a SLURM partition, as far as their shape goes.


TIMEOUT_S = 5.0

# Nodes, CPUs and GRES, one line for each kind of node; the default partition is marked with a star.
# Source: sinfo(1), SLURM 22.05.
NODES_FORMAT = "%P|%D|%c|%G"


def node_shape(host: Host, partition: str | None, gpus: int) -> NodeShape | None:
    """Return the CPUs and GPUs of a node, the smallest that fits; None where SLURM can't tell.

    Args:
        host: This machine.
        partition: Its name; None for the default one.
        gpus: GPUs that a node must have at least.
    """
    tool = host.which("sinfo")
    if not tool:
        return None
    where = ["-p", partition] if partition else []
    try:
        text = run_tool([tool, "-h", "-o", NODES_FORMAT, *where], timeout_s=TIMEOUT_S)
    except ToolError:
        return None
    return parse_shape(text, gpus, default_only=partition is None)


def parse_shape(text: str, gpus: int, *, default_only: bool) -> NodeShape | None:
    """Read what ``sinfo -h -o FORMAT`` printed; None where no node of the partition fits."""
    shapes = []
    for line in text.splitlines():
        cells = line.split("|", 3)
        if len(cells) < 4 or (default_only and not cells[0].endswith("*")):
            continue
        # Where nodes differ sinfo prints the fewest CPUs with a plus sign behind.
        nodes, cpus = cells[1], cells[2].rstrip("+")
        if nodes.isdecimal() and cpus.isdecimal() and gpus_of(cells[3]) >= gpus:
            shapes.append(NodeShape(int(cpus), gpus_of(cells[3]), int(nodes)))
    if not shapes:
        return None
    smallest = min(shapes, key=lambda shape: shape.cpus)
    return replace(smallest, nodes=sum(shape.nodes for shape in shapes))
