"""The nodes of a SLURM partition, as far as their shape goes."""

from __future__ import annotations

from dataclasses import replace

from fasttrain.hardware.cluster import gpus_of
from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.model.job import NodeShape

TIMEOUT_S = 5.0

# Nodes, CPUs and GRES, one line for each kind of node; the default partition is marked with a star.
# Source: sinfo(1), SLURM 22.05.
FORMAT = "%P|%D|%c|%G"


def node_shape(host: Host, partition: str | None, gpus: int) -> NodeShape | None:
    """Give the CPUs and GPUs of a node, the smallest that fits; None where SLURM can't tell.

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
        text = run_tool([tool, "-h", "-o", FORMAT, *where], timeout_s=TIMEOUT_S)
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
