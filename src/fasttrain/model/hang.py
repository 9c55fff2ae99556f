"""A run without progress: the records of hang.json, and the heartbeats by which it is seen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from fasttrain.model.errors import demand

NO_PROGRESS = "no progress"

HANG_SCHEMA = 1
HANG_FILE = "hang.json"  # in the run directory

Role = Literal["rank", "loader worker", "child"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack.

    Attributes:
        file: Path of the file, as Python names it.
        line: Line number, from 1.
        function: Name of the function.
        source: Text of the line; empty if the file can't be read.
        user: Whether it is the user's own code.
    """

    file: str
    line: int
    function: str
    source: str = ""
    user: bool = False


@dataclass(frozen=True, slots=True)
class StuckProcess:
    """One process of a rank.

    Attributes:
        pid: Its process ID.
        role: ``rank`` for the worker itself.
        threads: Its stacks, the main thread's first, each from the innermost frame outwards.
        missing: Why there are no stacks; empty if there are.
    """

    pid: int
    role: Role
    threads: tuple[tuple[Frame, ...], ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True)
class StuckRank:
    """One rank.

    Attributes:
        rank: Global rank.
        steps: Its optimizer steps.
        processes: The worker and the Python processes that it started.
    """

    rank: int
    steps: int
    processes: tuple[StuckProcess, ...]

    def __post_init__(self) -> None:
        demand(bool(self.processes), "a rank has a process")


@dataclass(frozen=True, slots=True)
class Hang:
    """The state of a run that made no progress for too long.

    Attributes:
        run_id: Name of the run.
        quiet_s: Seconds without progress.
        limit_s: Seconds without progress that count as a hang.
        action: ``stop``: the run is stopped; ``report``: it goes on, as the user asked; ``spare``:
            it goes on because nobody waits for its only process, or something still transfers.
        verdict: Who waits for whom, one sentence each.
        ranks: The ranks of this node that still run.
        ended: Ranks of this node that have ended.
    """

    run_id: str
    quiet_s: float
    limit_s: float
    action: Literal["stop", "report", "spare"]
    verdict: tuple[str, ...]
    ranks: tuple[StuckRank, ...]
    ended: tuple[int, ...] = ()
    schema: int = HANG_SCHEMA


# Heartbeats: a worker shows its launcher that it makes progress by a few numbers in shared memory.
#
# The memory is a memfd, which has no name in any file system: it is freed with the last process
# that holds it, and a step never waits for a disk. Ranks write into memory that the launcher holds,
# so that the numbers outlive them; processes that the script starts hold memory of their own. The
# launcher finds a record by the process ID and the descriptor in heartbeat-N.json.

MEMORY_NAME = "fasttrain-heartbeat"
MEMORY_BYTES = 4096  # one page
RECORD_BYTES = 64  # one cache line, so that ranks don't slow each other down (false sharing)
MOST_RANKS = MEMORY_BYTES // RECORD_BYTES
# For the ranks of a node: the launcher's process ID and its descriptor of the memory.
HEARTBEATS_VARIABLE = "FASTTRAIN_HEARTBEATS"


class Slot(IntEnum):
    """Index of each number in a record of unsigned 64-bit words."""

    STEPS = 0  # optimizer steps
    BEATS = 1  # DataLoader batches, collectives, and calls of roots if levers hook them
    P95_NS = 2  # 95th percentile of the time of a step
    ENDED = 3  # 1 once the script has ended
    RANK = 4  # global rank + 1; 0 while the record is unused


@dataclass(frozen=True, slots=True)
class HeartbeatAddress:
    """The place of one process's heartbeat record, as written to ``heartbeat-N.json``.

    Attributes:
        rank: Global rank.
        pid: Process ID.
        descriptor: Its descriptor of the memory.
        record: Index of its record in the memory.
        signal: Signal at which it writes its Python stacks; 0 if no signal was free.
    """

    rank: int
    pid: int
    descriptor: int
    record: int
    signal: int


def stacks_file(rank: int) -> str:
    """Return the name of the file that a rank's processes write their stacks to."""
    return f"stacks-{rank}.txt"
