"""Takes snapshots: when one is due, all ranks alike, whether it could be written or not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from fasttrain.shim.data_parallel.lever_state import Kept
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.snapshots.files import Manifest, Snapshots
from fasttrain.shim.snapshots.preempt_signal import ASKED
from fasttrain.shim.snapshots.training_state import Loop

# Has all ranks take a snapshot at one step, without a word between them until one is wanted.
#
# A rank that wants one tells the others behind which step it did, and goes on. Gradients are
# averaged in every step, so that a rank that has made the next step knows that all others have
# begun it, and that what they said before is there to be read: the snapshot is taken one step
# behind the last of those that were named.


END = "end"
_GO_ON = "go on"


class Agreement:
    """One rank's part in it; each snapshot is a round."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks if ranks is not None and ranks.world_size > 1 else None
        self._round = 0
        self._said = False
        self._ends = False
        self._step: int | None = None

    def due(self, step: int, *, ends: bool) -> bool:
        """True if the snapshot is to be taken now; called at each turn once this rank wants one.

        Args:
            step: Steps so far.
            ends: Whether the run is to end behind it.
        """
        if self._ranks is None:
            self._ends = ends
            return True
        if not self._said:
            self._said = True
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
        """Return whether the run ends behind the snapshot that is due."""
        return self._ends

    def gather(self, own: str) -> list[str]:
        """Return what each rank has written, once all have."""
        if self._ranks is None:
            return [own]
        self._ranks.store.set(self._key("wrote", self._ranks.rank), own)
        with self._ranks.waits():
            keys = [self._key("wrote", rank) for rank in range(self._ranks.world_size)]
            return [self._ranks.store.get(key).decode() for key in keys]

    def finish(self, problem: str) -> str:
        """Be ready for another snapshot, and give what rank 0 says went wrong with this one.

        Args:
            problem: What this rank has to say, which only counts from rank 0.
        """
        if self._ranks is not None:
            key = self._key("done", 0)
            if self._ranks.rank == 0:
                self._ranks.store.set(key, problem or "-")  # an empty value is none
            with self._ranks.waits():
                problem = self._ranks.store.get(key).decode().removeprefix("-")
        self._round += 1
        self._said, self._step, self._ends = False, None, False
        return problem


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
        """Return whether one is to be taken now, between two batches."""
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
