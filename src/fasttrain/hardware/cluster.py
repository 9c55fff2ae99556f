"""A SLURM cluster as its tools show it: partitions, nodes, the user's accounts, and this job."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import ToolError, first_line, run_tool
from fasttrain.model.job import NodeShape
from fasttrain.model.machine import Cluster, Partition
from fasttrain.model.settings import Association, ClusterFacts, NodeKind, PartitionLimits

T = TypeVar("T")

SINFO_TIMEOUT_S = 2.0

# Partition (with a star if it is the default), availability, time limit, nodes by state, GRES.
# Source: sinfo(1), SLURM 24.11; in src/sinfo/sinfo.c mixed and completing nodes are allocated.
FORMAT = "%P|%a|%l|%F|%G"

# The error of SLURM's tools on a machine that is in no cluster, and in a shell of a cluster's node
# without its SLURM_CONF or SLURM_CONF_SERVER. Recorded from SLURM's sinfo.
_UNCONFIGURED = "Could not establish a configuration source"

# The forms in which sinfo prints a partition, a time limit (D-HH:MM:SS, without leading zeros), and
# a GRES with GPUs: gpu:COUNT or gpu:TYPE:COUNT, in a list with other resources.
_LINE = re.compile(r"(\S+?)(\*?)\|(\w+)\|([^|]+)\|(\d+)/(\d+)/(\d+)/(\d+)\|(.*)")
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,(]+)*:(\d+)")


def find_cluster(host: Host, *, timeout_s: float = SINFO_TIMEOUT_S) -> Cluster:
    """Return the cluster; an empty one if SLURM is not installed."""
    job = host.environ.get("SLURM_JOB_ID", "")
    gpus = job_gpus(host.environ) if job else ()
    tool = host.which("sinfo")
    if not tool:
        return Cluster(job=job, job_gpus=gpus)
    version, error, partitions, configured = "", "", tuple[Partition, ...](), True
    try:
        # The version is printed without the controller, as "slurm 24.11.3".
        version = run_tool([tool, "--version"], timeout_s=timeout_s).strip().removeprefix("slurm ")
        partitions = parse_sinfo(run_tool([tool, "-h", "-o", FORMAT], timeout_s=timeout_s))
    except ToolError as caught:
        error, configured = str(caught), _UNCONFIGURED not in caught.said
    except ValueError as caught:
        error = str(caught)
    return Cluster(version, partitions, error, job, gpus, configured)


def job_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of the job's step on this node, or of the whole job if it has no step."""
    listed = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS", "")
    return tuple(gpu for gpu in listed.split(",") if gpu)


def parse_sinfo(text: str) -> tuple[Partition, ...]:
    """Return the partitions in the output of ``sinfo -h -o FORMAT``.

    It has one line for each partition and kind of node.

    Raises:
        ValueError: If a line has another form.
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
    """Return the number of GPUs in a node's GRES, such as ``gpu:a100:8(S:0-1),shard:32``."""
    return sum(int(count) for count in _GPUS.findall(gres))


def time_limit_min(text: str) -> int | None:
    """Return a time limit such as ``1-12:00:00`` or ``30:00`` in minutes; None for no limit.

    Raises:
        ValueError: If it has another form.
    """
    if text == "infinite":
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"sinfo printed a time limit that fasttrain can't read: {text[:40]}")
    days, hours, minutes, _ = (int(part or 0) for part in found.groups())
    return days * 24 * 60 + hours * 60 + minutes


# The CPUs and GPUs of a partition's nodes.


SHAPE_TIMEOUT_S = 5.0

# Partition (with a star if it is the default), nodes, CPUs and GRES; a line for each kind of node.
# Source: sinfo(1), SLURM 22.05.
NODES_FORMAT = "%P|%D|%c|%G"


def node_shape(host: Host, partition: str | None, gpus: int) -> NodeShape | None:
    """Return the shape of the smallest node that fits; None if SLURM gives no answer.

    Args:
        host: This machine.
        partition: Its name; None for the default one.
        gpus: Least number of GPUs of a node.
    """
    tool = host.which("sinfo")
    if not tool:
        return None
    where = ["-p", partition] if partition else []
    try:
        text = run_tool([tool, "-h", "-o", NODES_FORMAT, *where], timeout_s=SHAPE_TIMEOUT_S)
    except ToolError:
        return None
    return parse_shape(text, gpus, default_only=partition is None)


def parse_shape(text: str, gpus: int, *, default_only: bool) -> NodeShape | None:
    """Return the smallest fitting node in the output of ``sinfo``; None if none fits.

    Its `nodes` are all that fit.
    """
    shapes = []
    for line in text.splitlines():
        cells = line.split("|", 3)
        if len(cells) < 4 or (default_only and not cells[0].endswith("*")):
            continue
        # If nodes differ, sinfo prints the fewest CPUs, followed by a plus sign.
        nodes, cpus = cells[1], cells[2].rstrip("+")
        if nodes.isdecimal() and cpus.isdecimal() and gpus_of(cells[3]) >= gpus:
            shapes.append(NodeShape(int(cpus), gpus_of(cells[3]), int(nodes)))
    if not shapes:
        return None
    smallest = min(shapes, key=lambda shape: shape.cpus)
    return replace(smallest, nodes=sum(shape.nodes for shape in shapes))


# The limits of a job: of partitions, nodes and the user's accounts.


LIMITS_TIMEOUT_S = 20.0  # a busy controller takes its time

# Partition, state, nodes, CPUs, MiB and GRES; --exact gives nodes that differ lines of their own.
# Source: sinfo(1), SLURM 22.05.
NODES = ("sinfo", "--all", "--noheader", "--exact", "--format=%R|%T|%D|%c|%m|%G")
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")  # hidden ones as well
CONFIG = ("scontrol", "show", "config")
ASSOCIATIONS = ("sacctmgr", "--noheader", "--parsable2", "show", "associations")
# Marks after a node's state. Source: sinfo(1), SLURM 22.05, "NODE STATE CODES".
_MARKS = "*~#!%$@^-+"
_ENFORCE, _STORAGE = "AccountingStorageEnforce", "AccountingStorageType"


def find_limits(host: Host, *, timeout_s: float = LIMITS_TIMEOUT_S) -> ClusterFacts:
    """Return what the cluster allows; all its tools run at the same time.

    Args:
        host: This machine.
        timeout_s: Limit of each tool, in seconds.
    """
    user = (f"user={_user()}", "format=Account,Partition,QOS")
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(_ask, host, argv, timeout_s)
            for argv in (PARTITIONS, NODES, CONFIG, (*ASSOCIATIONS, *user))
        ]
    texts = [each.result() for each in asked]
    unread: list[tuple[str, str]] = []
    partitions = _read("partitions", texts[0], parse_partitions, unread)
    nodes = _read("nodes", texts[1], parse_nodes, unread)
    config = dict(_read("configuration", texts[2], parse_config, unread) or ())
    storage = config.get(_STORAGE)
    accounting = None if storage is None else not storage.endswith("none")
    # Without accounting, sacctmgr prints an error that would be reported as unreadable.
    of_user = _read("accounts", texts[3], parse_associations, unread) if accounting else None
    enforced = config.get(_ENFORCE, "").split(",")
    return ClusterFacts(
        partitions=partitions or (),
        nodes=nodes or (),
        associations=of_user,
        accounting=accounting,
        enforced=frozenset(enforced) - {"none", ""},
        unread=tuple(unread),
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user id without a name, as in some containers
        return str(os.getuid())


def _ask(host: Host, argv: tuple[str, ...], timeout_s: float) -> str | ToolError:
    tool = host.which(argv[0])
    if not tool:
        return ToolError(f"{argv[0]} is not on PATH")
    try:
        return run_tool([tool, *argv[1:]], timeout_s=timeout_s)
    except ToolError as error:
        return error


def _read(
    what: str,
    text: str | ToolError,
    parse: Callable[[str], Iterator[T]],
    unread: list[tuple[str, str]],
) -> tuple[T, ...] | None:
    """Return a tool's parsed answer; None if it can't be read, with the reason in `unread`."""
    if isinstance(text, ToolError):
        unread.append((what, str(text)))
        return None
    try:
        found = tuple(parse(text))
    except ValueError:  # a number of thousands of digits
        found = ()
    if found or (what == "accounts" and not text.strip()):  # a user may have no account
        return found
    unread.append((what, f"its answer can't be read: {first_line(text)[:80] or 'it is empty'}"))
    return None


def parse_partitions(text: str) -> Iterator[PartitionLimits]:
    """Yield the partitions in the output of `PARTITIONS`; skip lines of another form."""
    for line in text.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        name, nodes = fields.get("PartitionName"), fields.get("TotalNodes", "")
        if not name or "State" not in fields or not nodes.isdecimal():
            continue
        most = fields.get("MaxNodes", "")
        yield PartitionLimits(
            name=name,
            state=fields["State"],
            default=fields.get("Default") == "YES",
            time_limit_min=_minutes(fields.get("MaxTime", "")),
            nodes=int(nodes),
            max_nodes=int(most) if most.isdecimal() else None,
        )


def _minutes(text: str) -> int | None:
    """Return a limit in minutes; None for ``UNLIMITED`` or an unknown form."""
    try:
        return time_limit_min(text)
    except ValueError:
        return None


def parse_nodes(text: str) -> Iterator[NodeKind]:
    """Yield the kinds of nodes in the output of `NODES`; skip lines of another form."""
    for line in text.splitlines():
        cells = line.split("|", 5)
        numbers = [cell.rstrip("+") for cell in cells[2:5]]
        if len(cells) == 6 and all(map(str.isdecimal, numbers)):
            count, cpus, memory_mb = map(int, numbers)
            state = cells[1].rstrip(_MARKS)
            yield NodeKind(cells[0], state, count, cpus, memory_mb, gpus_of(cells[5]))


def parse_config(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and values in the output of `CONFIG`."""
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name.strip(), value.strip()


def parse_associations(text: str) -> Iterator[Association]:
    """Yield the associations in the output of `ASSOCIATIONS`; skip lines of another form."""
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) == 3 and cells[0]:
            yield Association(cells[0], cells[1], tuple(q for q in cells[2].split(",") if q))
