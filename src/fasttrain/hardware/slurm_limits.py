"""What a job may ask of a SLURM cluster: its partitions, its nodes, and the user's accounts."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fasttrain.hardware.cluster import gpus_of, time_limit_min
from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import ToolError, first_line, run_tool
from fasttrain.model.slurm import Association, ClusterFacts, NodeKind, PartitionLimits

T = TypeVar("T")

TIMEOUT_S = 20.0  # a busy controller takes its time

# Partition, state, number of nodes, CPUs, MiB and GRES; -e keeps nodes that differ apart.
# Source: sinfo(1), SLURM 22.05.
NODES = ("sinfo", "--all", "--noheader", "--exact", "--format=%R|%T|%D|%c|%m|%G")
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")  # hidden ones as well
CONFIG = ("scontrol", "show", "config")
ASSOCIATIONS = ("sacctmgr", "--noheader", "--parsable2", "show", "associations")
# Marks behind a node's state. Source: sinfo(1), SLURM 22.05, "NODE STATE CODES".
_MARKS = "*~#!%$@^-+"
_ENFORCE, _STORAGE = "AccountingStorageEnforce", "AccountingStorageType"


def find_limits(host: Host, *, timeout_s: float = TIMEOUT_S) -> ClusterFacts:
    """Return what the cluster allows; all of its tools are asked at the same time.

    Args:
        host: This machine.
        timeout_s: Seconds that each tool has.
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
    # sacctmgr complains in its own words where there is nothing to ask.
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
    except KeyError:  # a number without a name, as in some containers
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
    """Return what a tool said, or None with the reason in `unread`."""
    if isinstance(text, ToolError):
        unread.append((what, str(text)))
        return None
    try:
        found = tuple(parse(text))
    except ValueError:  # a number of thousands of digits
        found = ()
    if found or (what == "accounts" and not text.strip()):  # of which a user may have none
        return found
    unread.append((what, f"its answer can't be read: {first_line(text)[:80] or 'it is empty'}"))
    return None


def parse_partitions(text: str) -> Iterator[PartitionLimits]:
    """Read what `PARTITIONS` printed; lines of another kind are left out."""
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
    """Return a limit in minutes; None for ``UNLIMITED``, and for what sets no known limit."""
    try:
        return time_limit_min(text)
    except ValueError:
        return None


def parse_nodes(text: str) -> Iterator[NodeKind]:
    """Read what `NODES` printed; lines of another kind are left out."""
    for line in text.splitlines():
        cells = line.split("|", 5)
        numbers = [cell.rstrip("+") for cell in cells[2:5]]
        if len(cells) == 6 and all(map(str.isdecimal, numbers)):
            count, cpus, memory_mb = map(int, numbers)
            state = cells[1].rstrip(_MARKS)
            yield NodeKind(cells[0], state, count, cpus, memory_mb, gpus_of(cells[5]))


def parse_config(text: str) -> Iterator[tuple[str, str]]:
    """Read what `CONFIG` printed: names with their values."""
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name.strip(), value.strip()


def parse_associations(text: str) -> Iterator[Association]:
    """Read what `ASSOCIATIONS` printed; lines of another kind are left out."""
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) == 3 and cells[0]:
            yield Association(cells[0], cells[1], tuple(q for q in cells[2].split(",") if q))
