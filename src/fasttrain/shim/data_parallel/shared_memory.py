"""Memory that the ranks of one node share."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

from fasttrain.shim.process import rank_variables


def on_one_node(world_size: int) -> bool:
    """Whether all ranks are on this node."""
    return rank_variables.get("LOCAL_WORLD_SIZE") == str(world_size)


def shared_memory(store: Any, name: str, rank: int, world_size: int, size: int) -> mmap.mmap | None:
    """Make memory of zeros that all ranks share; every rank must call this alike.

    Args:
        store: Key-value store of all ranks.
        name: Of the memory, in the store.
        rank: Global rank of this worker.
        world_size: Number of ranks.
        size: Bytes.

    Returns:
        None where the ranks are on several nodes, or the memory could not be had.
    """
    if not on_one_node(world_size):
        return None
    # Made when all are here, so that its name is there for a moment only: a run may be killed.
    if store.add(f"{name}/here", 1) == world_size:
        store.set(f"{name}/met", "")
    if rank == 0:
        store.get(f"{name}/met")
        store.set(name, _new_file(size))
    path = store.get(name).decode()
    memory = _mapped(path, size) if path else None
    # Nothing of it is left behind, however the run ends: the name goes once all have it.
    if memory is None:
        store.set(f"{name}/all", "no")
    elif store.add(f"{name}/open", 1) == world_size:
        store.set(f"{name}/all", "yes")
    together = store.get(f"{name}/all") == b"yes"
    if rank == 0 and path:
        Path(path).unlink(missing_ok=True)
    return memory if together else None


def _new_file(size: int) -> str:
    """Return the path of a file of zeros that only this user can open; empty for none."""
    for folder in ("/dev/shm", None):  # noqa: S108 - made by mkstemp, and gone in a moment
        try:
            descriptor, path = tempfile.mkstemp(prefix="fasttrain-", dir=folder)
        except OSError:
            continue
        try:
            _fill(descriptor, size)
        except OSError:  # full
            Path(path).unlink()
            continue
        finally:
            os.close(descriptor)
        return path
    return ""


def _fill(descriptor: int, size: int) -> None:
    """Write zeros: a file that only has its size takes memory later, when there may be none."""
    left = size
    while left:
        left -= os.write(descriptor, bytes(min(left, 1 << 20)))


def _mapped(path: str, size: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another view of the file system
        return None
    try:
        return mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
