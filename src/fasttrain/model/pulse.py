"""How a worker shows its launcher that it goes on: a few numbers in memory that both see.

The memory has no name in any file system: it goes with the processes that hold it, and a step
never waits for a disk. The ranks write theirs into memory that the launcher holds, so that it
outlives them; processes that the script starts hold their own. The launcher finds each record by
the process and its descriptor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MEMORY_NAME = "fasttrain-pulse"
MEMORY_BYTES = 4096  # one page
RECORD_BYTES = 64  # one line of the processor's cache: no rank slows another down
MOST_RANKS = MEMORY_BYTES // RECORD_BYTES
# For the ranks of a node: the launcher's process and its descriptor of the memory.
PULSES_VARIABLE = "FASTTRAIN_PULSES"


class Slot(IntEnum):
    """Where each number is, counted in unsigned 64-bit words."""

    STEPS = 0  # optimizer steps
    BEATS = 1  # DataLoader batches, collectives, and calls of roots where levers see them
    P95_NS = 2  # 95th percentile of a step
    ENDED = 3  # 1 once the script has come to its end
    RANK = 4  # global rank + 1; 0 where none has come


@dataclass(frozen=True, slots=True)
class PulseAddress:
    """Where one process of a rank has its record, as it stands in ``pulse-N.json``.

    Attributes:
        rank: Global rank.
        pid: The process.
        descriptor: Its descriptor of the memory.
        record: Which of the memory's records is its own.
        signal: Signal at which it writes its Python stacks; 0 when no signal was free.
    """

    rank: int
    pid: int
    descriptor: int
    record: int
    signal: int


def stacks_file(rank: int) -> str:
    """Give the name of the file that a rank's processes write their stacks to."""
    return f"stacks-{rank}.txt"
