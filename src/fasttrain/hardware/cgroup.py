"""What the control groups of this process let it have, in version 1, version 2 and both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from fasttrain.hardware.host import Host

MOUNT = "sys/fs/cgroup"


def quota_cores(host: Host) -> float | None:
    """Return the tightest CPU quota in cores, such as 1.5; None when there is none."""
    quotas = [_quota(host, folder) for folder in _folders(host, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit_bytes(host: Host) -> int | None:
    """Return the tightest memory limit in bytes; None when there is none."""
    limits = [
        host.read(f"{folder}/{name}").strip()
        for folder in _folders(host, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)


def oom_kills(host: Host) -> int | None:
    """Return a count that rises with each process of this group that the kernel kills for memory.

    That counts those that it kills because the whole machine has none left, too, and in version 2
    those of the groups below. The groups above count whoever else is in them.

    Returns:
        None where the kernel doesn't tell.

    Source: Documentation/admin-guide/cgroup-v2.rst, memory.events, and cgroup-v1/memory.rst,
    memory.oom_control, of Linux 6.12; mm/oom_kill.c, __oom_kill_process.
    """
    counts = (
        int(words[1])
        for folder in _folders(host, "memory")
        for name in ("memory.events", "memory.oom_control")
        for line in host.read(f"{folder}/{name}").splitlines()
        if (words := line.split())[:1] == ["oom_kill"]
    )
    return next(counts, None)


def _quota(host: Host, folder: str) -> float | None:
    words = host.read(f"{folder}/cpu.max").split() or [
        host.read(f"{folder}/cpu.cfs_quota_us").strip(),
        host.read(f"{folder}/cpu.cfs_period_us").strip(),
    ]
    # No limit reads "max" in version 2 and -1 in version 1; neither is all digits.
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _folders(host: Host, controller: str) -> Iterator[str]:
    """Yield the folders whose limits bind this process: its group's and all those above it.

    Inside a container the path in ``/proc/self/cgroup`` may be the host's, of which only the
    mount itself is visible; the walk ends there in any case.
    """
    for line in host.read("proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2; beside version 1 it is mounted one level down
            mounts = (MOUNT, f"{MOUNT}/unified")
        elif controller in controllers.split(","):
            mounts = (f"{MOUNT}/{controllers}", f"{MOUNT}/{controller}")
        else:
            continue
        for mount in mounts:
            yield from _upwards(mount, path)


def _upwards(mount: str, path: str) -> Iterator[str]:
    group = PurePosixPath(path.strip("/"))
    if ".." not in group.parts:  # a group outside this namespace: only the mount is ours to see
        yield from (f"{mount}/{level}" for level in (group, *group.parents) if level.parts)
    yield mount
