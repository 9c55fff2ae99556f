"""How a worker shows its launcher that it goes on: a few numbers in memory that both see.

The memory has no name in any file system: it goes with the processes that hold it, and a step
never waits for a disk. The launcher finds it by the process and its descriptor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MEMORY_NAME = "fasttrain-pulse"
MEMORY_BYTES = 64


class Slot(IntEnum):
    """Where each number is, counted in unsigned 64-bit words."""

    STEPS = 0  # optimizer steps
    BEATS = 1  # DataLoader batches, and calls of roots where levers see them
    P95_NS = 2  # 95th percentile of a step
    ENDED = 3  # 1 once the script has come to its end


@dataclass(frozen=True, slots=True)
class PulseAddress:
    """Where one process of a rank has its record, as it stands in ``pulse-N.json``.

    Attributes:
        rank: Global rank.
        pid: The process.
        descriptor: Its descriptor of the memory.
        signal: Signal at which it writes its Python stacks; 0 when no signal was free.
    """

    rank: int
    pid: int
    descriptor: int
    signal: int


def stacks_file(rank: int) -> str:
    """Give the name of the file that a rank's processes write their stacks to."""
    return f"stacks-{rank}.txt"
