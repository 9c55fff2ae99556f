"""Everything that a snapshot holds of a training loop: tracked, saved and restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from fasttrain.shim.data_parallel.lever_state import LeverState
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.snapshots import object_states
from fasttrain.shim.snapshots.files import FoundSnapshot
from fasttrain.shim.snapshots.gradient_hooks import GradientHooks
from fasttrain.shim.snapshots.loader_epochs import LoaderEpochs, StoredError
from fasttrain.shim.snapshots.object_states import Registry
from fasttrain.shim.snapshots.random_states import RandomStates
from fasttrain.shim.snapshots.replayed_files import Buffers, OwnCheckpoints
from fasttrain.shim.snapshots.scalar_reads import ScalarReads
from fasttrain.shim.snapshots.script_tensors import ScriptTensors

SHARED = "shared.pt"


class LoopState:
    """The state of the script's training loop on this rank.

    Attributes:
        registry: Its modules, optimizers, schedulers and scalers.
        epochs: Its epochs over DataLoaders.
        tensors: Tensors of the script itself, outside of modules and optimizers.
        checkpoints: The checkpoints that it loads itself.
        hooks: Knows whether it has hooks on gradients.
        stepping: True while an optimizer's step runs.
    """

    def __init__(self, rank: int, roots: RootCalls, lever_state: LeverState) -> None:
        self.registry = Registry()
        self.tensors = ScriptTensors(self._holders)
        self.checkpoints = OwnCheckpoints()
        self.hooks = GradientHooks()
        self.stepping = False
        self._rank, self._roots, self._lever_state = rank, roots, lever_state
        self._states = RandomStates(lever_state.streams)
        self.epochs = LoaderEpochs(self._states)
        self._reads = ScalarReads(self._apart, self.hooks)
        self._buffers = Buffers()
        self._begun: dict[str, Any] = {}  # states of the generators right after torch's import

    def install(self, undo: ExitStack) -> None:
        """Start to track it."""
        self.registry.install(undo)
        self.hooks.install(undo)
        self.epochs.install(undo)
        self._reads.install(undo)
        self._buffers.install(undo)

    def _apart(self) -> bool:
        """True if a replay skips the code that runs now."""
        return self.stepping or self.epochs.inside or self._roots.inside.flag

    def _holders(self) -> Iterator[tuple[str, Any]]:
        """Yield objects that may hold tensors, other than variables, with names for them."""
        yield from self.epochs.data_sets()
        yield from object_states.other_objects(self.registry)

    def files(self) -> dict[str, Any]:
        """Return what this rank writes, by file name.

        Raises:
            StoredError: If itertools holds batches that the loop will train on: no snapshot can.
        """
        if by := self.epochs.stored_by():
            raise StoredError(f"{by} keeps batches of a DataLoader")
        files: dict[str, Any] = {_of_rank(self._rank): self._own()}
        if self._rank == 0:
            files[SHARED] = object_states.shared_state(self.registry)
        return files

    def _own(self) -> dict[str, Any]:
        return {
            "begun": self._begun,
            "first step": self.checkpoints.since_s,
            "turn": self.epochs.turn,
            "modules": object_states.own_state(self.registry),
            "carried": self.tensors.state(),
            "kept": {name: lever.state() for name, lever in self._lever_state.states.items()},
            "passes": self.epochs.state(),
            "reads": self._reads.state(),
            "buffers": self._buffers.state(),
            "generators": self._states.capture(),
        }

    def begin(self) -> None:
        """Note the generators' states at the start of a run that resumes from nothing."""
        self._begun = self._states.capture()

    def begin_again(self, found: FoundSnapshot, undo: ExitStack) -> dict[str, Any]:
        """Start like the run that took a snapshot; return this rank's part of the snapshot."""
        own: dict[str, Any] = found.read(_of_rank(self._rank))
        self._begun = own["begun"]
        self._states.restore(self._begun)
        self.checkpoints.look_out(own["first step"], undo)
        self.epochs.replay(own["passes"])
        self._reads.replay(own["reads"])
        return own

    def end_replay(self, own: dict[str, Any]) -> None:
        """End the replay of what the loop reads.

        Raises:
            SystemExit: ``snapshot-diverged`` if the loop has read other things than before.
        """
        self._reads.arrive()
        self.epochs.arrive(own["passes"])

    def restore(self, found: FoundSnapshot, own: dict[str, Any]) -> None:
        """Put the saved state into everything.

        Raises:
            SystemExit: ``snapshot-mismatch`` or ``snapshot-diverged`` if it does not fit.
        """
        object_states.restore(self.registry, found.read(SHARED), own["modules"])
        self.tensors.restore(own["carried"])
        self._buffers.restore(own["buffers"])
        for name, lever in self._lever_state.states.items():
            lever.restore(own["kept"][name])
        self._states.restore(own["generators"])


def _of_rank(rank: int) -> str:
    return f"rank-{rank}.pt"
