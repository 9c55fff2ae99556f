"""Takes snapshots: when one is due, all ranks alike, whether it could be written or not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from fasttrain.shim.data_parallel.lever_state import Kept
from fasttrain.shim.snapshots.agreement import Agreement
from fasttrain.shim.snapshots.files import Manifest, Snapshots
from fasttrain.shim.snapshots.preempt_signal import ASKED
from fasttrain.shim.snapshots.training_state import Loop


class Taking:
    """This rank's part in taking them.

    Attributes:
        ends: Whether the run ends behind the one that was taken last.
    """

    def __init__(
        self, snapshots: Snapshots, loop: Loop, rank: int, kept: Kept, every_min: int | None
    ) -> None:
        self.ends = False
        self._snapshots, self._loop, self._rank = snapshots, loop, rank
        self._agreement = Agreement(kept.ranks)
        self._every_s = 60.0 * (every_min or 0)
        self.begin_interval(0)

    def begin_interval(self, step: int) -> None:
        """Take none before the next step, nor without a signal before the time is over."""
        self._last_step, self._next_s = step, time.monotonic() + self._every_s

    def due(self, step: int) -> bool:
        """Whether one is to be taken now, between two batches."""
        wanted = ASKED.flag or (self._every_s and time.monotonic() >= self._next_s)
        if not wanted or step == self._last_step:
            return False
        return self._agreement.due(step, ends=ASKED.flag)

    def take(self, step: int, identity: Mapping[str, str]) -> str:
        """Write one with the other ranks, and give what went wrong on any of them."""
        told = [json.loads(text) for text in self._agreement.gather(json.dumps(self._write(step)))]
        problems = [one["problem"] for one in told if "problem" in one]
        if self._rank == 0 and not problems:
            files = {name: digest for one in told for name, digest in one.items()}
            manifest = Manifest(step, dict(identity), files)
            problems = _problems(lambda: self._snapshots.finish(manifest))
        self.ends = self._agreement.ends
        problem = self._agreement.finish("; ".join(problems))
        self.begin_interval(step)
        if problem:
            ASKED.flag = self.ends = False
        return problem

    def _write(self, step: int) -> dict[str, str]:
        """Write this rank's files, and give their SHA-256 by name, or a problem."""
        digests: dict[str, str] = {}

        def write() -> None:
            for name, content in self._loop.files().items():
                digests[name] = self._snapshots.write(name, content, step)

        problems = _problems(write)
        return {"problem": problems[0]} if problems else digests


def _problems(act: Callable[[], None]) -> list[str]:
    """Do it; a full disk, or an object that can't be saved, must not end the script."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - told, on all ranks alike
        return [f"{type(error).__name__}: {error}"]
    return []
