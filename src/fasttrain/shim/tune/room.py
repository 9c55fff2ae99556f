"""Finds how much memory is left, and whether it suffices to compare results with fp64.

On a device torch raises where there is too little. On the host the kernel would end the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from fasttrain.processes.control_groups import group_folders
from fasttrain.shim.process import entry

# Bytes for each number of the parameters, of fp64 results of several repetitions and of what
# compares them. Measured at 10 layers of 1024 x 1024: 82 for a call, and 183 for a step of AdamW
# (torch 2.13, CPU).
FOR_CALL, FOR_STEP = 90, 200


# Files of a control group: its limit, its use, and in memory.stat what of that can be dropped.
# Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux 6.12.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_ROOT = Path("/")


def free_bytes() -> int:
    """Return the memory that the host and this process's control groups have left; 0 if unknown."""
    free = [_number("proc/meminfo", "MemAvailable:") * 1024]
    for folder in group_folders(_read, "memory"):
        for limit, used, dropped in _GROUP_FILES:
            most, now = _read(f"{folder}/{limit}").strip(), _read(f"{folder}/{used}").strip()
            if most.isdigit() and now.isdigit():  # the limit may be "max"
                left = int(most) - int(now) + _number(f"{folder}/memory.stat", dropped)
                free.append(max(1, left))
    return min(filter(None, free), default=0)


def _read(path: str) -> str:
    with suppress(OSError):
        return (_ROOT / path).read_text(errors="replace")
    return ""


def _number(path: str, name: str) -> int:
    """Return the number that a file has after a name; 0 if it has none."""
    for line in _read(path).splitlines():
        words = line.split()
        if words[:1] == [name] and words[1].isdigit():
            return int(words[1])
    return 0


def no_room(parameters: Iterable[Tensor], bytes_each: int) -> str:
    """Return why there is no memory to compare results; empty if there is, or it isn't known.

    Args:
        parameters: Of the model or optimizer.
        bytes_each: Bytes that are needed for each of their numbers.
    """
    numbers = sum(p.numel() for p in parameters if p.device.type == "cpu")
    ranks = int(entry.get("LOCAL_WORLD_SIZE", "1"))  # all compare at the same time
    needed, free = numbers * bytes_each * ranks, free_bytes()
    if not free or needed <= free:
        return ""
    return (
        f"comparing results with fp64 takes about {needed / 2**30:.1f} GiB of memory, and"
        f" {free / 2**30:.1f} GiB are free"
    )
