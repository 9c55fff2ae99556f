"""A run in which no rank goes on: who is where, as hang.json and the card tell it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from fasttrain.model.errors import demand

NO_PROGRESS = "no rank went on"

HANG_SCHEMA = 1
HANG_FILE = "hang.json"  # in the run directory

Role = Literal["rank", "loader worker", "child"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack.

    Attributes:
        file: Path as Python knows it.
        line: Number of the line.
        function: Name of the function.
        source: The line itself; empty where its file can't be read.
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
        pid: Its number.
        role: ``rank`` for the worker itself.
        threads: Its stacks, the main thread's first, each from the innermost frame outwards.
        missing: Why there are none; empty when there are.
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
        processes: The worker and what it has started, those that are Python.
    """

    rank: int
    steps: int
    processes: tuple[StuckProcess, ...]

    def __post_init__(self) -> None:
        demand(bool(self.processes), "a rank has a process")


@dataclass(frozen=True, slots=True)
class Hang:
    """What was found when no rank had gone on for a time.

    Attributes:
        run_id: Name of the run.
        quiet_s: Seconds without progress.
        limit_s: Seconds after which that counts as a hang.
        action: Whether the run is stopped; goes on, as was asked for; or is spared, since its only
            process computes.
        verdict: Who waits for whom, one sentence each.
        ranks: The ranks of this node that run.
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


# How a worker shows its launcher that it goes on: a few numbers in memory that both see.
#
# The memory has no name in any file system: it goes with the processes that hold it, and a step
# never waits for a disk. The ranks write theirs into memory that the launcher holds, so that it
# outlives them; processes that the script starts hold their own. The launcher finds each record
# by the process and its descriptor.


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
    """Return the name of the file that a rank's processes write their stacks to."""
    return f"stacks-{rank}.txt"
