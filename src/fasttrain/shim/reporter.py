"""Writes a worker's report and events for the launcher."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fasttrain.files.writing import Lines, write_private
from fasttrain.model.codec import dumps
from fasttrain.model.outcome import RankReport
from fasttrain.model.secrets import secret_values, without_secrets

NOT_RECORDED = "fasttrain: this run is not recorded for now"


class Reporter:
    """The files of one process; only the process that made it writes them.

    Args:
        run_dir: The run directory.
        rank: Global rank of the worker.
        pid: The worker. A child that it forked may import torch before it does; the levers work
            there too, but the files are the worker's.
        child: Whether it is a process that the script started: it has a report of its own, which
            the launcher adds to its worker's, and no events.
    """

    def __init__(self, run_dir: Path, rank: int, pid: int, *, child: bool = False) -> None:
        self.child = child
        self._pid = pid
        self._told = False
        self._secrets = secret_values(os.environ, sys.argv[1:])
        name = f"rank-{rank}.child-{pid}.json" if child else f"rank-{rank}.json"
        self._report_path = run_dir / name
        self._events = Lines(run_dir / f"events-{rank}.jsonl")

    def report(self, make: Callable[[], RankReport]) -> None:
        """Replace the report; renamed into place, so that nobody ever meets half of one."""
        # The disk isn't waited for: that would hold up a step, and only outlives a loss of power.
        self._guarded(lambda: write_private(self._report_path, self._text(make()), durable=False))

    def event(self, make: Callable[[], dict[str, Any]]) -> None:
        """Add a line to the events."""
        if not self.child:
            self._guarded(lambda: self._events.add(json.dumps(make())))

    def _text(self, report: RankReport) -> str:
        """Return the report; torch tells values in its reasons for a new graph."""
        return dumps(without_secrets(RankReport, report, self._secrets))

    def _guarded(self, write: Callable[[], None]) -> None:
        """Write; a full disk or a lost directory must not end the script.

        It is tried again the next time, when there may be room.
        """
        if os.getpid() != self._pid:
            return
        try:
            write()
        except OSError as error:
            if not self._told:
                self._told = True
                with suppress(OSError):  # nobody reads it any more
                    print(f"{NOT_RECORDED}: {error}", file=sys.stderr)  # noqa: T201


# The time of a run's events, and when the time of day was set meanwhile.


JUMP_S = 2.0  # slewing a clock moves it by 1.8 s an hour at most; Source: ntpd(8), 500 ppm


class Clock:
    """The time of day beside the clock that nobody sets, which stands while the machine sleeps.

    Attributes:
        warnings: The first jump, in a sentence; the events hold them all.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._apart_s = time.time() - time.monotonic()

    def read(self, step: int) -> dict[str, float]:
        """Return both times in seconds, and by how much the time of day has jumped since last time.

        Args:
            step: Optimizer steps so far.
        """
        time_s, monotonic_s = time.time(), time.monotonic()
        jump_s = time_s - monotonic_s - self._apart_s
        self._apart_s += jump_s
        now = {"time_s": time_s, "monotonic_s": monotonic_s}
        if abs(jump_s) <= JUMP_S:
            return now
        if not self.warnings:
            self.warnings.append(
                f"the time of day jumped {'ahead' if jump_s > 0 else 'back'} by"
                f" {abs(jump_s):,.0f} s before step {step}: it was set, or the machine slept; go by"
                " monotonic_s in the events"
            )
        return {**now, "clock_jump_s": jump_s}
