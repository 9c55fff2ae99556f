"""Decides when a snapshot is due, on all ranks alike, and writes it together with them."""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from fasttrain.shim.data_parallel.context import LeverState
from fasttrain.shim.data_parallel.random_streams import seed_accelerators
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.roots import RootCalls, in_backward
from fasttrain.shim.snapshots import object_states
from fasttrain.shim.snapshots.files import FoundSnapshot, Manifest, Snapshots
from fasttrain.shim.snapshots.loader_epochs import LoaderEpochs, StoredError
from fasttrain.shim.snapshots.object_states import RandomStates, Registry
from fasttrain.shim.snapshots.preempt_signal import PREEMPT_SIGNAL
from fasttrain.shim.snapshots.replayed_files import Buffers, LeftFiles, OwnCheckpoints
from fasttrain.shim.snapshots.root_outputs import RootOutputs
from fasttrain.shim.snapshots.saved_files import SavedFiles
from fasttrain.shim.snapshots.scalar_reads import GradientHooks, ScalarReads
from fasttrain.shim.snapshots.script_tensors import ScriptTensors

# Everything that a snapshot holds of a training loop: tracked, saved and restored.


SHARED = "shared.pt"
APPENDED = "appended"  # folder in a snapshot's for what was appended to files after it
TRAINED_APART = "the script trains in processes that it forks, whose state is in no snapshot"


class TrainedApartError(Exception):
    """Raised if a process that the script has forked makes optimizer steps."""


class LoopState:
    """The state of the script's training loop on this rank.

    Attributes:
        registry: Its modules, optimizers, schedulers and scalers.
        epochs: Its epochs over DataLoaders.
        tensors: Tensors of the script itself, outside of modules and optimizers.
        checkpoints: The checkpoints that it loads itself.
        saved: The files that it has saved.
        files_left: Leaves files unchanged in a replay.
        hooks: Knows whether it has hooks on gradients.
        reads: The numbers that it has read.
        outputs: What its models have returned.
        stepping: True while an optimizer's step runs.
    """

    def __init__(self, rank: int, roots: RootCalls, lever_state: LeverState) -> None:
        self.registry = Registry()
        self.tensors = ScriptTensors(self._holders)
        self.checkpoints = OwnCheckpoints()
        self.saved = SavedFiles(acts=rank == 0)
        self.files_left = LeftFiles(self.saved)
        self.hooks = GradientHooks()
        self.stepping = False
        self._apart_flag = mmap.mmap(-1, 1)  # shared with all children
        self._rank, self._roots, self._lever_state = rank, roots, lever_state
        self._states = RandomStates(lever_state.streams)
        self.epochs = LoaderEpochs(self._states)
        self.reads = ScalarReads(self._apart, self.hooks)
        self.outputs = RootOutputs(lambda: self.epochs.inside or in_backward())
        self._buffers = Buffers()
        self._begun: dict[str, Any] = {}  # states of the generators right after torch's import

    def install(self, undo: ExitStack) -> None:
        """Start to track it."""
        self.registry.install(undo)
        self.hooks.install(undo)
        self.epochs.install(undo)
        self.reads.install(undo)
        self.outputs.install(self._roots, undo)
        self._buffers.install(undo)
        self.files_left.install(undo)

    @property
    def trained_apart(self) -> bool:
        """True if a child that the script has forked made an optimizer step."""
        return self._apart_flag[0] != 0

    def note_apart(self, *_: Any) -> None:
        """Note in such a child that it made one."""
        self._apart_flag[0] = 1

    def _apart(self) -> bool:
        """True if a replay skips the code that runs now."""
        inside = self._roots.inside  # its parts may be split among ranks
        in_root = inside.flag or inside.part is not None
        return self.stepping or self.epochs.inside or in_root

    def _holders(self) -> Iterator[tuple[str, Any]]:
        """Yield objects that may hold tensors, other than variables, with names for them."""
        yield from self.epochs.data_sets()
        yield from object_states.other_objects(self.registry)

    def files(self) -> dict[str, Any]:
        """Return what this rank writes, by file name.

        Raises:
            StoredError: If itertools holds batches that the loop will train on: no snapshot can.
            TrainedApartError: If a forked child has trained.
        """
        if self.trained_apart:
            raise TrainedApartError(TRAINED_APART)
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
            "trained": object_states.trained_parameters(self.registry),
            "carried": self.tensors.state(),
            "own generators": self.tensors.generators(),
            "numbers": self.tensors.numbers(),
            "kept": {name: lever.state() for name, lever in self._lever_state.states.items()},
            "passes": self.epochs.state(),
            "reads": self.reads.state(),
            "outputs": self.outputs.state(),
            "buffers": self._buffers.state(),
            "files": self.saved.state(),
            "appended": self.files_left.appended(),
            "generators": self._states.capture(),
        }

    def begin(self) -> None:
        """Note the generators' states at the start of a run that resumes from nothing."""
        seed_accelerators()
        self._begun = self._states.capture()

    def begin_again(self, found: FoundSnapshot, undo: ExitStack) -> dict[str, Any]:
        """Start like the run that took a snapshot; return this rank's part of the snapshot."""
        own: dict[str, Any] = found.read(_of_rank(self._rank))
        self._begun = own["begun"]
        self._states.restore(self._begun)
        seed_accelerators()
        self.checkpoints.look_out(own["first step"], undo)
        self.saved.need(own["files"], found.path)
        self.files_left.need(own["appended"], found.path / APPENDED)
        self.epochs.replay(own["passes"])
        self.reads.replay(own["reads"])
        self.outputs.replay(own["outputs"])
        return own

    def end_replay(self, own: dict[str, Any]) -> None:
        """End the replay of what the loop reads.

        Raises:
            SystemExit: ``snapshot-diverged`` if the loop has read other things than before.
        """
        self.reads.arrive()
        self.outputs.arrive()
        self.epochs.arrive(own["passes"])

    def restore(self, found: FoundSnapshot, own: dict[str, Any]) -> None:
        """Put the saved state into everything.

        Raises:
            SystemExit: ``snapshot-mismatch`` or ``snapshot-diverged`` if it does not fit.
        """
        object_states.release(self.registry)
        object_states.restore(self.registry, found.read(SHARED), own["modules"])
        self.tensors.restore(own["carried"])
        self.tensors.restore_generators(own["own generators"])
        self.tensors.restore_numbers(own["numbers"])
        self._buffers.restore(own["buffers"])
        for name, lever in self._lever_state.states.items():
            lever.restore(own["kept"][name])
        self._states.restore(own["generators"])


def _of_rank(rank: int) -> str:
    return f"rank-{rank}.pt"


# Decides when a snapshot is due, on all ranks alike, and writes it together with them.


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
        else:
            self._loop.saved.need(self._loop.saved.state(), self._snapshots.place(step))
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
