"""Writes a worker's report and events for the launcher."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasttrain.spec.codec import dumps
from fasttrain.spec.outcome import RankReport


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
        self._mute = False
        name = f"rank-{rank}.child-{pid}.json" if child else f"rank-{rank}.json"
        self._report_path = run_dir / name
        self._events_path = run_dir / f"events-{rank}.jsonl"

    def report(self, make: Callable[[], RankReport]) -> None:
        """Replace the report; renamed into place, so that nobody ever meets half of one."""

        def write() -> None:
            draft = self._report_path.with_suffix(".tmp")
            with _private(draft, "w") as file:
                file.write(dumps(make()))
            draft.replace(self._report_path)

        self._guarded(write)

    def event(self, make: Callable[[], dict[str, Any]]) -> None:
        """Add a line to the events."""

        def write() -> None:
            with _private(self._events_path, "a") as file:
                file.write(json.dumps(make()) + "\n")

        if not self.child:
            self._guarded(write)

    def _guarded(self, write: Callable[[], None]) -> None:
        """Write; a full disk or a lost directory must not end the script."""
        if self._mute or os.getpid() != self._pid:
            return
        try:
            write()
        except OSError as error:
            self._mute = True
            print(f"fasttrain: this run is no longer recorded: {error}", file=sys.stderr)  # noqa: T201


def _private(path: Path, mode: str) -> Any:
    return open(path, mode, encoding="utf-8", opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
