"""Finds this process's control groups, in version 1, version 2, or both together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

MOUNT = "sys/fs/cgroup"
Read = Callable[[str], str]  # returns the text of a path below the root; empty if it has none


def group_folders(read: Read, controller: str) -> Iterator[str]:
    """Yield the folders whose limits apply to this process: its group's and all those above it.

    Args:
        read: Reads a file.
        controller: Such as ``memory``.
    """
    for line in read("proc/self/cgroup").splitlines():
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
