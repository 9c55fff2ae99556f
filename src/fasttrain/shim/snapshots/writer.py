"""Decides when a snapshot is due, on all ranks alike, and writes it together with them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from fasttrain.shim.data_parallel.lever_state import LeverState
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.snapshots.files import Manifest, Snapshots
from fasttrain.shim.snapshots.preempt_signal import PREEMPT_SIGNAL
from fasttrain.shim.snapshots.training_state import LoopState

END = "end"
_GO_ON = "go on"


class Agreement:
    """One rank's part in agreeing on the step of a snapshot; each snapshot is a round.

    Ranks don't communicate until one wants a snapshot. That rank publishes after which step it
    wanted it, and goes on. Gradients are averaged in every step. So a rank that has made the next
    step knows that all others have begun it, and that whatever they published before can be read:
    the snapshot is taken one step after the last of the published ones.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks if ranks is not None and ranks.world_size > 1 else None
        self._round = 0
        self._published = False
        self._ends = False
        self._step: int | None = None

    def due(self, step: int, *, ends: bool) -> bool:
        """True if the snapshot is to be taken now; called at each turn once this rank wants one.

        Args:
            step: Number of steps so far.
            ends: True if the run is to end after it.
        """
        if self._ranks is None:
            self._ends = ends
            return True
        if not self._published:
            self._published = True
            said = f"{step} {END if ends else _GO_ON}"
            self._ranks.store.set(self._key("want", self._ranks.rank), said)
        if self._step is None:
            self._listen(self._ranks)
        return self._step is not None and step >= self._step

    def _listen(self, ranks: Ranks) -> None:
        keys = [self._key("want", rank) for rank in range(ranks.world_size)]
        if not ranks.store.check(keys):
            return
        said = [ranks.store.get(key).decode().partition(" ") for key in keys]
        self._step = 1 + max(int(step) for step, _, _ in said)
        self._ends = any(kind == END for _, _, kind in said)

    def _key(self, what: str, rank: int) -> str:
        return f"snapshot/{self._round}/{what}/{rank}"

    @property
    def ends(self) -> bool:
        """True if the run ends after the snapshot that is due."""
        return self._ends

    def gather(self, own: str) -> list[str]:
        """Wait until all ranks have written; return their reports, in the order of ranks."""
        if self._ranks is None:
            return [own]
        self._ranks.store.set(self._key("wrote", self._ranks.rank), own)
        with self._ranks.waits():
            keys = [self._key("wrote", rank) for rank in range(self._ranks.world_size)]
            return [self._ranks.store.get(key).decode() for key in keys]

    def finish(self, problem: str) -> str:
        """End the round; return rank 0's problem with this snapshot, empty if there was none.

        Args:
            problem: This rank's problem; only rank 0's counts.
        """
        if self._ranks is not None:
            key = self._key("done", 0)
            if self._ranks.rank == 0:
                self._ranks.store.set(key, problem or "-")  # the store takes no empty value
            with self._ranks.waits():
                problem = self._ranks.store.get(key).decode().removeprefix("-")
        self._round += 1
        self._published, self._step, self._ends = False, None, False
        return problem


class SnapshotWriter:
    """This rank's part in taking snapshots.

    Attributes:
        ends: True if the run ends after the last snapshot.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        loop: LoopState,
        rank: int,
        lever_state: LeverState,
        every_min: int | None,
    ) -> None:
        self.ends = False
        self._snapshots, self._loop, self._rank = snapshots, loop, rank
        self._agreement = Agreement(lever_state.ranks)
        self._every_s = 60.0 * (every_min or 0)
        self.begin_interval(0)

    def begin_interval(self, step: int) -> None:
        """Take none before the next step, nor before the interval ends unless a signal comes."""
        self._last_step, self._next_s = step, time.monotonic() + self._every_s

    def due(self, step: int) -> bool:
        """True if a snapshot is to be taken now, between two batches."""
        wanted = PREEMPT_SIGNAL.flag or (self._every_s and time.monotonic() >= self._next_s)
        if not wanted or step == self._last_step:
            return False
        return self._agreement.due(step, ends=PREEMPT_SIGNAL.flag)

    def take(self, step: int, identity: Mapping[str, str]) -> str:
        """Write a snapshot with the other ranks; return their problems, empty if there are none."""
        own = json.dumps(self._write(step))
        reports = [json.loads(text) for text in self._agreement.gather(own)]
        problems = [one["problem"] for one in reports if "problem" in one]
        if self._rank == 0 and not problems:
            files = {name: digest for one in reports for name, digest in one.items()}
            manifest = Manifest(step, dict(identity), files)
            problems = _problems(lambda: self._snapshots.finish(manifest))
        self.ends = self._agreement.ends
        problem = self._agreement.finish("; ".join(problems))
        self.begin_interval(step)
        if problem:
            PREEMPT_SIGNAL.flag = self.ends = False
        return problem

    def _write(self, step: int) -> dict[str, str]:
        """Write this rank's files; return their SHA-256 by name, or ``problem`` and its text."""
        digests: dict[str, str] = {}

        def write() -> None:
            for name, content in self._loop.files().items():
                digests[name] = self._snapshots.write(name, content, step)

        problems = _problems(write)
        return {"problem": problems[0]} if problems else digests


def _problems(act: Callable[[], None]) -> list[str]:
    """Return what failed: a full disk, or an object that can't be saved, must not end the run."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - reported, on all ranks alike
        return [f"{type(error).__name__}: {error}"]
    return []
