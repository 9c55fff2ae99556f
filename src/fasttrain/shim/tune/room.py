"""Finds whether the host has the memory in which results are compared with fp64.

On a device torch raises where there is too little. On the host the kernel would end the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from fasttrain.shim.process import entry

# Bytes for each number of the parameters, of fp64 results of several repetitions and of what
# compares them. Measured at 10 layers of 1024 x 1024: 82 for a call, and 183 for a step of AdamW
# (torch 2.13, CPU).
FOR_CALL, FOR_STEP = 90, 200


def free_bytes() -> int:
    """Return the memory that the host has left; 0 if that isn't known."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
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
