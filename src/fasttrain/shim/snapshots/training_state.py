"""All that a snapshot holds of a training loop: followed, given, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from fasttrain.shim.data_parallel.lever_state import Kept
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.snapshots import object_states
from fasttrain.shim.snapshots.files import Found
from fasttrain.shim.snapshots.gradient_hooks import GradientHooks
from fasttrain.shim.snapshots.loader_epochs import LoaderPasses, StoredError
from fasttrain.shim.snapshots.object_states import Registry
from fasttrain.shim.snapshots.random_states import RandomStates
from fasttrain.shim.snapshots.replayed_files import Buffers, OwnCheckpoints
from fasttrain.shim.snapshots.scalar_reads import Reads
from fasttrain.shim.snapshots.script_tensors import Carried

SHARED = "shared.pt"


class Loop:
    """The script's loop on this rank.

    Attributes:
        registry: What it trains.
        passes: What it reads by DataLoaders.
        carried: Tensors of its own.
        checkpoints: What it saves itself.
        hooks: Whether it has hooks on gradients.
        stepping: Whether an optimizer's step is being made.
    """

    def __init__(self, rank: int, roots: RootCalls, kept: Kept) -> None:
        self.registry = Registry()
        self.carried = Carried(self._holders)
        self.checkpoints = OwnCheckpoints()
        self.hooks = GradientHooks()
        self.stepping = False
        self._rank, self._roots, self._kept = rank, roots, kept
        self._states = RandomStates(kept.streams)
        self.passes = LoaderPasses(self._states)
        self._reads = Reads(self._apart, self.hooks)
        self._buffers = Buffers()
        self._begun: dict[str, Any] = {}  # states of the generators when torch came in

    def install(self, undo: ExitStack) -> None:
        """Follow it."""
        self.registry.install(undo)
        self.hooks.install(undo)
        self.passes.install(undo)
        self._reads.install(undo)
        self._buffers.install(undo)

    def _apart(self) -> bool:
        """Return whether what runs now is left out by a replay."""
        return self.stepping or self.passes.inside or self._roots.inside.flag

    def _holders(self) -> Iterator[tuple[str, Any]]:
        """Yield what may hold tensors beside variables."""
        yield from self.passes.data_sets()
        yield from object_states.other_objects(self.registry)

    def files(self) -> dict[str, Any]:
        """Return what this rank writes, by the name of the file.

        Raises:
            StoredError: It would not hold all that the loop will train on.
        """
        if by := self.passes.stored_by():
            raise StoredError(f"{by} keeps batches of a DataLoader")
        files: dict[str, Any] = {_of_rank(self._rank): self._own()}
        if self._rank == 0:
            files[SHARED] = object_states.shared_state(self.registry)
        return files

    def _own(self) -> dict[str, Any]:
        return {
            "begun": self._begun,
            "first step": self.checkpoints.since_s,
            "turn": self.passes.turn,
            "modules": object_states.own_state(self.registry),
            "carried": self.carried.state(),
            "kept": {name: kept.state() for name, kept in self._kept.states.items()},
            "passes": self.passes.state(),
            "reads": self._reads.state(),
            "buffers": self._buffers.state(),
            "generators": self._states.capture(),
        }

    def begin(self) -> None:
        """Begin at the beginning."""
        self._begun = self._states.capture()

    def begin_again(self, found: Found, undo: ExitStack) -> dict[str, Any]:
        """Begin as the run of a snapshot began, and give this rank's part of it."""
        own: dict[str, Any] = found.read(_of_rank(self._rank))
        self._begun = own["begun"]
        self._states.restore(self._begun)
        self.checkpoints.look_out(own["first step"], undo)
        self.passes.replay(own["passes"])
        self._reads.replay(own["reads"])
        return own

    def stand(self, own: dict[str, Any]) -> None:
        """End the replay of what the loop read.

        Raises:
            SystemExit: ``snapshot-diverged`` where the loop did not come to where it was.
        """
        self._reads.arrive()
        self.passes.arrive(own["passes"])

    def restore(self, found: Found, own: dict[str, Any]) -> None:
        """Return everything the state that it had.

        Raises:
            SystemExit: ``snapshot-mismatch`` or ``snapshot-diverged`` when it does not fit.
        """
        object_states.restore(self.registry, found.read(SHARED), own["modules"])
        self.carried.restore(own["carried"])
        self._buffers.restore(own["buffers"])
        for name, kept in self._kept.states.items():
            kept.restore(own["kept"][name])
        self._states.restore(own["generators"])


def _of_rank(rank: int) -> str:
    return f"rank-{rank}.pt"
