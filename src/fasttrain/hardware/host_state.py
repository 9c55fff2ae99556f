"""Limits and surroundings of this process."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from fasttrain.hardware.cgroup import memory_limit_bytes, oom_kills, quota_cores
from fasttrain.hardware.disks import find_disks
from fasttrain.hardware.host import Host
from fasttrain.hardware.runs import RunProcess, orphans
from fasttrain.hardware.tool import within
from fasttrain.hardware.vendors.kernel_files import rdma_ports
from fasttrain.model.crash import Surroundings
from fasttrain.model.examination import HostState

RESOLVE_TIMEOUT_S = 0.5


def host_state(host: Host, *, run_root: Path, runs: Mapping[int, RunProcess]) -> HostState:
    """Return the state of the machine outside of its devices.

    Args:
        host: The machine.
        run_root: Where run directories are made.
        runs: Processes of fasttrain's runs.
    """
    total, free = shared_memory(host)
    return HostState(
        shm_bytes=total,
        shm_free_bytes=free,
        open_files=_limits("RLIMIT_NOFILE"),
        locked_memory_bytes=next(iter(_limits("RLIMIT_MEMLOCK") or ()), None),
        disks=find_disks(host, run_root),
        memory_available_bytes=memory_available_bytes(host),
        load=_load(host),
        logical_cpus=_logical_cpus(host),
        quota_cores=quota_cores(host),
        numa_nodes=_numa_nodes(host),
        hostname_resolves=hostname_resolves(platform.node()),
        ports=_ports(host),
        container=container(host),
        kernel=host.read("proc/sys/kernel/osrelease").strip() or platform.release(),
        orphans=orphans(runs),
        rdma_ports=rdma_ports(host),
    )


def shared_memory(host: Host) -> tuple[int | None, int | None]:
    """Return the size of /dev/shm and what is free of it, in bytes; None where there is none."""
    try:
        stat = os.statvfs(host.root / "dev/shm")
    except OSError:
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def hostname_resolves(name: str, *, timeout_s: float = RESOLVE_TIMEOUT_S) -> bool:
    """True if a name has an address; one that isn't there in time would stall a run as well."""
    try:
        return bool(within(timeout_s, lambda: socket.getaddrinfo(name, None)))
    except (OSError, UnicodeError):  # gaierror and TimeoutError are OSErrors; "" and "a..b" are not
        return False


def memory_available_bytes(host: Host) -> int | None:
    """Return what can be had without swapping, at most the cgroup's whole limit; None off Linux."""
    for line in host.read("proc/meminfo").splitlines():
        words = line.split()
        if words[:1] == ["MemAvailable:"] and words[1].isdecimal():
            available = int(words[1]) * 1024
            return min(available, memory_limit_bytes(host) or available)
    return None


def container(host: Host) -> str:
    """Return the kind of container that this process is in; empty outside of one.

    Source: the files and variables that each leaves for its guests; systemd's container interface
    for LXC (systemd.io/CONTAINER_INTERFACE, version 257).
    """
    variables = host.environ
    if variables.get("KUBERNETES_SERVICE_HOST"):  # before docker, which may run its pods
        return "kubernetes"
    if variables.get("APPTAINER_CONTAINER") or variables.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if host.exists("run/.containerenv"):
        return "podman"
    if host.exists(".dockerenv"):
        return "docker"
    named = host.read("run/systemd/container").strip()
    return "lxc" if named.startswith("lxc") else named


def _limits(name: str) -> tuple[int, ...] | None:
    """Return soft and hard limit; -1 for none, and None on Windows, which has no limits to ask."""
    try:
        import resource
    except ImportError:
        return None
    limits = resource.getrlimit(getattr(resource, name))
    return tuple(-1 if limit == resource.RLIM_INFINITY else limit for limit in limits)


def _load(host: Host) -> float | None:
    words = host.read("proc/loadavg").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def _logical_cpus(host: Host) -> int | None:
    """Return how many processors are switched on, from a list such as ``0-3,8``."""
    try:
        return _count(host.read("sys/devices/system/cpu/online").strip())
    except ValueError:
        return os.cpu_count()


def _count(cpus: str) -> int:
    ends = [part.split("-") for part in cpus.split(",")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _numa_nodes(host: Host) -> int | None:
    nodes = host.numbered("sys/devices/system/node", r"node(\d+)")
    # Memory alone, such as that of a CXL card or a Grace Hopper's GPU, makes a node as well.
    return sum(bool(host.read(f"{node}/cpulist").strip()) for node in nodes) or None


def _ports(host: Host) -> tuple[int, ...] | None:
    words = host.read("proc/sys/net/ipv4/ip_local_port_range").split()
    return tuple(map(int, words)) if len(words) == 2 and all(map(str.isdecimal, words)) else None


# What of this machine explains the failure of a run: memory that ran out.


def look_around(host: Host) -> Surroundings:
    """Return the machine's memory, and how many processes the lack of it has cost so far."""
    return Surroundings(
        group_oom_kills=oom_kills(host),
        machine_oom_kills=_counted(host, "proc/vmstat", "oom_kill"),
        memory_limit_bytes=_limit(host),
        memory_bytes=_memory_bytes(host),
        shm_bytes=shared_memory(host)[0],
    )


def _limit(host: Host) -> int | None:
    """Return the limit; version 1 says "none" by a number that no machine has."""
    limit, total = memory_limit_bytes(host), _memory_bytes(host)
    return None if limit is None or (total and limit > total) else limit


def _memory_bytes(host: Host) -> int | None:
    kib = _counted(host, "proc/meminfo", "MemTotal:")
    return None if kib is None else kib * 1024


def _counted(host: Host, path: str, name: str) -> int | None:
    for line in host.read(path).splitlines():
        words = line.split()
        if words[:1] == [name] and words[1:] and words[1].isdecimal():
            return int(words[1])
    return None
