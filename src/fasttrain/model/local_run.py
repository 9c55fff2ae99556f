"""A run as it is seen on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasttrain.model.examination import DeviceProcess

RunState = Literal["running", "orphaned", "finished"]


@dataclass(frozen=True, slots=True)
class LocalRun:
    """One run on this machine.

    Attributes:
        run_id: Its name.
        state: ``running`` under its launcher, between two attempts too; ``orphaned`` if that was
            killed; ``finished`` if the run came to its end, and the script left something running.
        started_s: When the first of its processes started, in seconds since 1970.
        processes: What is alive of it but the launcher, with the device memory that each holds.
        run_dir: Its directory; empty where it isn't known.
        launcher: Number of the launcher's process; 0 where there is none, or on a node of SLURM.
    """

    run_id: str
    state: RunState
    started_s: float
    processes: tuple[DeviceProcess, ...]
    run_dir: str = ""
    launcher: int = 0

    @property
    def memory_bytes(self) -> int:
        """Device memory that the run holds; 0 when unknown."""
        return sum(process.memory_bytes for process in self.processes)
