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

from fasttrain.files import Lines, write_private
from fasttrain.model.codec import dumps
from fasttrain.model.outcome import RankReport
from fasttrain.model.secrets import secret_values, without_secrets

NOT_RECORDED = "fasttrain: this run can't be recorded at the moment"


class Reporter:
    """Writes the files of one process; does nothing in processes that are forked from it.

    Args:
        run_dir: The run directory.
        rank: Global rank of the worker.
        child: Whether the script started the process. It then has a report of its own, which the
            launcher adds to that of its worker, and no events.
    """

    def __init__(self, run_dir: Path, rank: int, *, child: bool = False) -> None:
        self.child = child
        self._pid = os.getpid()
        self._warned = False
        self._secrets = secret_values(os.environ, sys.argv[1:])
        name = f"rank-{rank}.child-{self._pid}.json" if child else f"rank-{rank}.json"
        self._report_path = run_dir / name
        self._events = Lines(run_dir / f"events-{rank}.jsonl")

    def report(self, make: Callable[[], RankReport]) -> None:
        """Replace the report, by a rename: readers never find half of one."""
        # No fsync: it would hold up a step, and helps only against a loss of power.
        self._guarded(lambda: write_private(self._report_path, self._text(make()), durable=False))

    def event(self, make: Callable[[], dict[str, Any]]) -> None:
        """Add a line to the events."""
        if not self.child:
            self._guarded(lambda: self._events.add(json.dumps(make())))

    def _text(self, report: RankReport) -> str:
        """Return the report without secrets, which torch's reasons for a recompile may contain."""
        return dumps(without_secrets(RankReport, report, self._secrets))

    def _guarded(self, write: Callable[[], None]) -> None:
        """Call ``write``; a full disk or a lost directory must not end the script.

        The next report or event tries again, when there may be room.
        """
        if os.getpid() != self._pid:
            return
        try:
            write()
        except OSError as error:
            if not self._warned:
                self._warned = True
                with suppress(OSError):  # stderr may be a pipe that nobody reads any more
                    print(f"{NOT_RECORDED}: {error}", file=sys.stderr)  # noqa: T201


# ntpd slews a clock by at most 1.8 s an hour: more is a jump. Source: ntpd(8), 500 ppm
JUMP_S = 2.0


class Clock:
    """Reads the time of day and the monotonic clock, and finds jumps of the first.

    The monotonic clock can't be set, and stops while the machine sleeps.

    Attributes:
        warnings: The first jump, in a sentence; the events hold all of them.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._apart_s = time.time() - time.monotonic()

    def read(self, step: int) -> dict[str, float]:
        """Return both times, in seconds, and the jump of the time of day since the last call.

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
