"""The state of the host: limits, memory, disks and names."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from fasttrain.hardware.cpu import memory_limit_bytes, oom_kills, quota_cores
from fasttrain.hardware.host import Host
from fasttrain.hardware.runs import RunProcess, orphans
from fasttrain.hardware.tool import within
from fasttrain.hardware.vendors.kernel_files import rdma_ports
from fasttrain.model.crash import Surroundings
from fasttrain.model.machine import Disk, HostState, Purpose
from fasttrain.model.places import COMPILED_FOLDER, cache_folder

RESOLVE_TIMEOUT_S = 0.5


def host_state(host: Host, *, run_root: Path, runs: Mapping[int, RunProcess]) -> HostState:
    """Return the state of the machine without its devices.

    Args:
        host: The machine.
        run_root: The folder of run directories.
        runs: Processes of fasttrain's runs, by pid.
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
    """Return the size and the free space of /dev/shm in bytes; None if there is none."""
    try:
        stat = os.statvfs(host.root / "dev/shm")
    except OSError:
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def hostname_resolves(name: str, *, timeout_s: float = RESOLVE_TIMEOUT_S) -> bool:
    """True if a name resolves in time; a slow resolver would stall a run as well."""
    try:
        return bool(within(timeout_s, lambda: socket.getaddrinfo(name, None)))
    except (OSError, UnicodeError):  # gaierror and TimeoutError are OSErrors; "" and "a..b" are not
        return False


def memory_available_bytes(host: Host) -> int | None:
    """Return the bytes available without swapping, at most the cgroup's limit; None off Linux."""
    kib = host.counted("proc/meminfo", "MemAvailable:")
    if kib is None:
        return None
    return min(kib * 1024, memory_limit_bytes(host) or kib * 1024)


def container(host: Host) -> str:
    """Return the kind of container that this process runs in; empty outside of containers.

    Source: the files and variables that each kind sets in its containers; systemd's container
    interface for LXC (systemd.io/CONTAINER_INTERFACE, version 257).
    """
    variables = host.environ
    # Kubernetes comes first: its pods may run in docker or podman.
    if variables.get("KUBERNETES_SERVICE_HOST"):
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
    """Return the soft and the hard limit, -1 for no limit; None on Windows, which has none."""
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
    """Return the number of online processors, which the kernel lists like ``0-3,8``."""
    try:
        return _count(host.read("sys/devices/system/cpu/online").strip())
    except ValueError:
        return os.cpu_count()


def _count(cpus: str) -> int:
    ends = [part.split("-") for part in cpus.split(",")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _numa_nodes(host: Host) -> int | None:
    nodes = host.numbered("sys/devices/system/node", r"node(\d+)")
    # Nodes without CPUs don't count: memory of a CXL card or Grace Hopper's GPU is a node as well.
    return sum(bool(host.read(f"{node}/cpulist").strip()) for node in nodes) or None


def _ports(host: Host) -> tuple[int, ...] | None:
    words = host.read("proc/sys/net/ipv4/ip_local_port_range").split()
    return tuple(map(int, words)) if len(words) == 2 and all(map(str.isdecimal, words)) else None


# What may explain the failure of a run: memory that ran out.


def look_around(host: Host) -> Surroundings:
    """Return memory limits, and how many processes were killed for memory so far."""
    return Surroundings(
        group_oom_kills=oom_kills(host),
        machine_oom_kills=host.counted("proc/vmstat", "oom_kill"),
        memory_limit_bytes=_limit(host),
        memory_bytes=_memory_bytes(host),
        shm_bytes=shared_memory(host)[0],
    )


def _limit(host: Host) -> int | None:
    """Return the memory limit in bytes; version 1 writes "none" as a number above any memory."""
    limit, total = memory_limit_bytes(host), _memory_bytes(host)
    return None if limit is None or (total and limit > total) else limit


def _memory_bytes(host: Host) -> int | None:
    kib = host.counted("proc/meminfo", "MemTotal:")
    return None if kib is None else kib * 1024


# The folders that runs write to.


# A network file system blocks every call while its server is unreachable.
DISK_TIMEOUT_S = 2.0


def find_disks(
    host: Host, run_root: Path, *, timeout_s: float = DISK_TIMEOUT_S
) -> tuple[Disk, ...]:
    """Return the disks of run directories, compiled kernels and temporary files.

    A folder that doesn't answer within `timeout_s` is reported as full and not writable.
    """
    folders: dict[Purpose, Path] = {
        "runs": run_root,
        "cache": compiled_folder(host.environ),
        "temporary": temporary_folder(host.environ),
    }
    mounts = mount_types(host)
    return tuple(
        _disk(purpose, folder.absolute(), mounts, timeout_s) for purpose, folder in folders.items()
    )


def compiled_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of compiled kernels: the user's choice, or fasttrain's cache."""
    own = environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return Path(own) if own else cache_folder(environ) / COMPILED_FOLDER


def temporary_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of temporary files: that of the first variable that is set.

    Source: Python 3.11, tempfile.gettempdir.
    """
    named = (environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    return Path(next((path for path in named if path), "/tmp"))  # noqa: S108 - only looked at


def _disk(purpose: Purpose, folder: Path, mounts: dict[str, str], timeout_s: float) -> Disk:
    try:
        return within(timeout_s, lambda: _look(purpose, folder, mounts))
    except OSError:  # TimeoutError is one
        return Disk(
            purpose=purpose,
            path=str(folder),
            free_bytes=0,
            writable=False,
            executable=False,
            filesystem=filesystem_of(folder, mounts),
        )


def _look(purpose: Purpose, folder: Path, mounts: dict[str, str]) -> Disk:
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    stat = os.statvfs(existing)
    return Disk(
        purpose=purpose,
        path=str(existing),
        free_bytes=stat.f_bavail * stat.f_frsize,
        writable=os.access(existing, os.W_OK | os.X_OK),
        executable=not stat.f_flag & getattr(os, "ST_NOEXEC", 0),  # macOS has no such flag
        filesystem=filesystem_of(existing.resolve(), mounts),
    )


def mount_types(host: Host) -> dict[str, str]:
    """Return the file system type mounted at each path; the last mount hides earlier ones."""
    lines = (line.split() for line in host.read("proc/self/mounts").splitlines())
    return {_unescaped(words[1]): words[2] for words in lines if len(words) > 2}


def _unescaped(path: str) -> str:
    # The kernel writes spaces and backslashes as octal numbers: "\040".
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def filesystem_of(folder: Path, mounts: dict[str, str]) -> str:
    """Return the type of the file system of a folder; empty if unknown."""
    paths = (str(path) for path in (folder, *folder.parents))
    return next((mounts[path] for path in paths if path in mounts), "")
