"""Has all ranks take a snapshot at one step, without a word between them until one is wanted.

A rank that wants one tells the others behind which step it did, and goes on. Gradients are
averaged in every step, so that a rank that has made the next step knows that all others have
begun it, and that what they said before is there to be read: the snapshot is taken one step behind
the last of those that were named.
"""

from __future__ import annotations

from fasttrain.shim.data_parallel.ranks import Ranks

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
        """Whether the snapshot is to be taken now; called at each turn once this rank wants one.

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
        """Whether the run ends behind the snapshot that is due."""
        return self._ends

    def gather(self, own: str) -> list[str]:
        """Give what each rank has written, once all have."""
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
