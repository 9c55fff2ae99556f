"""The nodes of a SLURM partition, as far as their shape goes."""

from __future__ import annotations

from fasttrain.hardware.cluster import gpus_of
from fasttrain.hardware.host import Host, ToolError, run_tool
from fasttrain.spec.job import NodeShape

TIMEOUT_S = 5.0

# CPUs and GRES, one line for each kind of node; the default partition is marked with a star.
# Source: sinfo(1), SLURM 22.05.
FORMAT = "%P|%c|%G"


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
    """Read what ``sinfo -h -o FORMAT`` printed."""
    shapes = []
    for line in text.splitlines():
        name, _, rest = line.partition("|")
        cpus, _, gres = rest.partition("|")
        # Where nodes differ sinfo prints the fewest with a plus sign behind.
        if cpus.rstrip("+").isdecimal() and (not default_only or name.endswith("*")):
            shapes.append(NodeShape(int(cpus.rstrip("+")), gpus_of(gres)))
    fitting = [shape for shape in shapes if shape.gpus >= gpus]
    return min(fitting, key=lambda shape: shape.cpus, default=None)
