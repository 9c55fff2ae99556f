"""The seam between the relayed output of a run and whoever shows it."""

from __future__ import annotations

import os
import time
from collections.abc import Container
from contextlib import suppress
from typing import Any, Protocol

from fasttrain.model.plan import LaunchPlan

LONG_S = 5.0  # of compiling, after which a line reports it


class Display(Protocol):
    """Shows the script's output, and its progress between the lines.

    Attributes:
        shows: Whether the output reaches stdout and stderr.
    """

    shows: bool

    def write(self, descriptor: int, data: bytes) -> None:
        """Write the script's own bytes to stdout (1) or stderr (2).

        Raises:
            OSError: They can't be written. No other method raises it.
        """

    def progress(self, event: dict[str, Any]) -> None:
        """Show the latest event of rank 0."""

    def tick(self) -> None:
        """Show what is due; called several times a second."""

    def tell(self, text: str) -> None:
        """Print one sentence of fasttrain's own."""

    def close(self) -> None:
        """Erase the progress line."""


class PlainDisplay:
    """Passes the script's bytes on; of progress it shows only a compilation that takes long."""

    shows = True
    _compiling, _since_s = "", 0.0
    _told: frozenset[str] = frozenset()

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data``."""
        write_all(descriptor, data)

    def progress(self, event: dict[str, Any]) -> None:
        """Note what is being compiled."""
        name = event.get("compiling", "")
        self._compiling = name if isinstance(name, str) and name.isidentifier() else ""
        self._since_s = time.monotonic()

    def tick(self) -> None:
        """Report a compilation that takes long, so that nobody takes it for a hang."""
        if self._compiling in self._told or not self._compiling:
            return
        if time.monotonic() - self._since_s >= LONG_S:
            self._told |= {self._compiling}
            self.tell(f"compiling {self._compiling} ...")

    def tell(self, text: str) -> None:
        """Write a line to stderr; it may follow an unfinished line of the script's."""
        with suppress(OSError):  # nobody reads it, or stderr is closed
            write_all(2, f"fasttrain: {text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Nothing was drawn."""


class QuietDisplay(PlainDisplay):
    """Passes the script's bytes on and prints nothing of its own."""

    def tell(self, text: str) -> None:
        """Print nothing."""


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, in as many calls as the descriptor needs."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# Which ranks of this node are shown, and where each of them writes.


def log_name(plan: LaunchPlan) -> str:
    """Return the log file for the output of this node's first process."""
    return "rank-0.log" if _relays_rank_0(plan) else "agent.log"


def first_rank(plan: LaunchPlan) -> int:
    """Return the lowest rank of this node."""
    processes = plan.processes.value
    return processes.node_rank * processes.nproc_per_node


def shown_ranks(plan: LaunchPlan) -> Container[int]:
    """Return the ranks of this node that are shown; in an elastic run, of all that may be here."""
    processes, first = plan.processes.value, first_rank(plan)
    count = processes.world_size if processes.rdzv_endpoint else processes.nproc_per_node
    here = range(first, first + count)
    return (
        here if plan.show_ranks is None else frozenset(filter(here.__contains__, plan.show_ranks))
    )


def follows(plan: LaunchPlan, rank: int) -> bool:
    """True if a rank is shown from its own log, and not from the relayed stream."""
    return _shows(plan, rank) and not (rank == 0 and _relays_rank_0(plan))


def _shows(plan: LaunchPlan, rank: int) -> bool:
    return plan.show_ranks is None or rank in plan.show_ranks


def _relays_rank_0(plan: LaunchPlan) -> bool:
    """True if rank 0 writes to the relayed stream; in an elastic run it may be on any node."""
    elastic = plan.processes.value.rdzv_endpoint
    return not elastic and first_rank(plan) == 0 and _shows(plan, 0)
