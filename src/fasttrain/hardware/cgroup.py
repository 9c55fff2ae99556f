"""The limits of this process's control groups, in version 1, version 2, or both together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from fasttrain.hardware.host import Host

MOUNT = "sys/fs/cgroup"


def quota_cores(host: Host) -> float | None:
    """Return the tightest CPU quota in cores, such as 1.5; None if there is none."""
    quotas = [_quota(host, folder) for folder in _folders(host, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit_bytes(host: Host) -> int | None:
    """Return the tightest memory limit in bytes; None if there is none."""
    limits = [
        host.read(f"{folder}/{name}").strip()
        for folder in _folders(host, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)


def oom_kills(host: Host) -> int | None:
    """Return how many processes of this group the kernel has killed for memory; None if unknown.

    The count includes processes killed because the whole machine ran out of memory, and in version
    2 those of the groups below.

    Source: Documentation/admin-guide/cgroup-v2.rst, memory.events, and cgroup-v1/memory.rst,
    memory.oom_control, of Linux 6.12; mm/oom_kill.c, __oom_kill_process.
    """
    # The first folder is the group's own; those above count the processes of other groups as well.
    counts = (
        host.counted(f"{folder}/{name}", "oom_kill")
        for folder in _folders(host, "memory")
        for name in ("memory.events", "memory.oom_control")
    )
    return next((count for count in counts if count is not None), None)


def _quota(host: Host, folder: str) -> float | None:
    words = host.read(f"{folder}/cpu.max").split() or [
        host.read(f"{folder}/cpu.cfs_quota_us").strip(),
        host.read(f"{folder}/cpu.cfs_period_us").strip(),
    ]
    # Without a limit the file holds "max" in version 2 and -1 in version 1.
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _folders(host: Host, controller: str) -> Iterator[str]:
    """Yield the folders whose limits apply to this process: its group's and all those above it."""
    for line in host.read("proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2; next to version 1 it is mounted one level down
            mounts = (MOUNT, f"{MOUNT}/unified")
        elif controller in controllers.split(","):
            mounts = (f"{MOUNT}/{controllers}", f"{MOUNT}/{controller}")
        else:
            continue
        for mount in mounts:
            yield from _upwards(mount, path)


def _upwards(mount: str, path: str) -> Iterator[str]:
    # Inside a container the path may be the host's, of which only the mount itself is visible. So
    # the mount is read in any case, and nothing else for a group outside of this namespace ("..").
    group = PurePosixPath(path.strip("/"))
    if ".." not in group.parts:
        yield from (f"{mount}/{level}" for level in (group, *group.parents) if level.parts)
    yield mount
