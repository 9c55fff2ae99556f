"""How many optimizer steps each rank of this node has made, when it has ended, too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from fasttrain.launch.hang.heartbeats import Pulses, RankMemory
from fasttrain.model.codec import CodecError
from fasttrain.model.outcome import RankReport
from fasttrain.model.reading import load

LOOK_S = 1.0


class Progress:
    """Reads what the ranks show while they run, and what they reported."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._pulses = Pulses(run_dir)
        self._memory = RankMemory()
        self._steps: dict[int, int] = {}
        self._looked_s = time.monotonic() - LOOK_S

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Give the environment of ranks that are to show their steps."""
        return self._memory.tell(environ)

    def tick(self) -> None:
        """Look for processes of the ranks' own that have begun."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        self._read()  # before those that have ended are let go
        self._pulses.find()

    def steps(self) -> dict[int, int]:
        """Give the steps by rank; a rank that trains in processes of its own has theirs."""
        self._read()
        for path in self._run_dir.glob("rank-*.json"):
            try:
                report = load(RankReport, path)
            except (OSError, CodecError):  # the receipt tells of it
                continue
            stats = report.stats
            # As its pulse has it: none before a step that an earlier attempt did not make
            self._note(report.rank, stats.steps if stats.steps > stats.resumed_from else 0)
        return dict(self._steps)

    def begin_again(self) -> None:
        """Forget the attempt before, all of whose processes have ended."""
        self._pulses.close()
        self._memory.clear()
        self._steps = {}

    def close(self) -> None:
        """Let go of what the ranks share."""
        self._pulses.close()
        self._memory.close()

    def _read(self) -> None:
        for rank, steps in self._memory.steps().items():
            self._note(rank, steps)
        for pulse in self._pulses.read():
            self._note(pulse.address.rank, pulse.steps)

    def _note(self, rank: int, steps: int) -> None:
        self._steps[rank] = max(self._steps.get(rank, 0), steps)
