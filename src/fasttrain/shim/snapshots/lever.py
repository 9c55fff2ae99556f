"""The lever that takes snapshots of a run that can be preempted, and resumes from one.

A resumed run starts like the first one, with the same random numbers. Up to its first optimizer
step it really computes. From there up to the batch before which the snapshot was taken, it is
replayed (see `fasttrain.shim.snapshots.replay`). At that batch everything gets its saved state.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
from contextlib import ExitStack
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.model.attempts import GOING_ON, NONE_YET, PREEMPTED_AFTER, restart_count
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS
from fasttrain.model.outcome import PREEMPTED, State
from fasttrain.model.plan import LaunchPlan, Target
from fasttrain.shim.data_parallel.context import LeverState
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.loop import begins_with_closure, closure_of
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.process import entry, refusal
from fasttrain.shim.process.refusal import LEAVING, refuse, refuse_anywhere
from fasttrain.shim.snapshots.files import (
    FoundSnapshot,
    NeedsPickleError,
    Snapshots,
    UntrustedError,
    log,
    packed,
    refuse_diverged,
    refuse_mismatch,
    refusing_what_fails,
)
from fasttrain.shim.snapshots.loader_epochs import stored
from fasttrain.shim.snapshots.object_states import shared_state
from fasttrain.shim.snapshots.preempt_signal import PREEMPT_SIGNAL
from fasttrain.shim.snapshots.replay import Replay, SilencedStdout
from fasttrain.shim.snapshots.writer import TRAINED_APART, LoopState, SnapshotWriter

# Finds the snapshot that a run resumes from, the same one on all ranks.


def identity_of(plan: LaunchPlan) -> dict[str, str]:
    """Return everything in the plan that a run's weights depend on.

    Call it at the start of the run: the script may be edited later, or change its arguments.
    """
    alone = plan.processes.value.backend == "direct"
    return {
        "script": hashlib.sha256(_text(plan.target, plan.cwd)).hexdigest(),
        "arguments": hashlib.sha256("\0".join(sys.argv[1:]).encode()).hexdigest(),
        "number of ranks": "1" if alone else entry.get("WORLD_SIZE", "1"),
        "device": plan.device_kind.value,
        **{
            f"--{name}": row.identity(getattr(plan.levers, name).value)
            for name, row in LEVERS.items()
            if row.identity
        },
        "torch": torch.__version__,
        "fasttrain": plan.fasttrain_version,
        "PYTHONHASHSEED": _hash_seed(),
    }


def _hash_seed() -> str:
    """Return what decides the order of sets of strings."""
    seed = os.environ.get("PYTHONHASHSEED") or "random"
    return f"random, with hashes such as {hash(seed)}" if seed == "random" else seed


def _text(target: Target, cwd: str) -> bytes:
    """Return the content of the file that runs."""
    if target.kind == "script":
        return Path(cwd, target.name).read_bytes()
    spec = _found(target.name)
    if spec is None or spec.origin is None or not hasattr(spec.loader, "get_data"):
        return target.name.encode()  # nothing to run: `python -m` reports it
    loader: Any = spec.loader
    text: bytes = loader.get_data(spec.origin)  # works for a module in a zip file, too
    return text


def _found(name: str) -> ModuleSpec | None:
    """Return a module's spec without importing its packages, one of which may be half imported."""
    spec, whole = None, ""
    for part in name.split("."):
        whole = f"{whole}.{part}".lstrip(".")
        path = None if spec is None else spec.submodule_search_locations
        spec = PathFinder.find_spec(whole, path)
        if spec is None:
            return None
    if spec is not None and spec.submodule_search_locations is not None:
        return PathFinder.find_spec(f"{name}.__main__", spec.submodule_search_locations)
    return spec


def compare(here: dict[str, str], then: dict[str, str]) -> None:
    """Check that this run's identity equals the snapshot's.

    Raises:
        SystemExit: ``snapshot-mismatch`` if not.
    """
    for name, value in here.items():
        before = then.get(name, "")
        if value == before:
            continue
        if name in ("script", "arguments"):
            refuse_mismatch(f"the {name} changed since the snapshot was taken")
        refuse_mismatch(f"{name} was {before} when the snapshot was taken, and is {value} now")


_FOLDER, _CHOICE = "snapshot/folder", "snapshot/choice"
_NONE = "-"  # the store takes no empty value


def shared_folder(run_dir: Path, ranks: Ranks | None) -> Path:
    """Return rank 0's run directory; each node's launcher may have its own."""
    return Path(_of_rank_0(ranks, _FOLDER, str(run_dir)))


def find(plan: LaunchPlan, snapshots: Snapshots, ranks: Ranks | None) -> FoundSnapshot | None:
    """Return the snapshot to resume from; None if the run starts from the beginning.

    Raises:
        SystemExit: ``snapshot-mismatch`` if it is another run's, ``snapshot-missing`` if one is
            required and there is none, ``snapshot-damaged`` if all are damaged,
            ``snapshot-untrusted`` if others could have written it.
    """
    # The plan doesn't know of restarts by the launcher or torchrun's agent.
    if plan.preempt.value.resume == "no" and not restart_count(os.environ):
        return None
    try:
        first = ranks is None or ranks.rank == 0
        found = _newest(plan, snapshots) if first else None
        choice = _of_rank_0(ranks, _CHOICE, found.path.name if found else _NONE)
        if choice != _NONE and found is None:
            found = snapshots.named(choice)
    except UntrustedError as error:
        refuse(untrusted(error))
    except (OSError, CodecError) as error:
        refuse(
            _none(
                plan, f"this rank can't read the snapshot that rank 0 has found: {error}", "missing"
            )
        )
    if found is not None:
        compare(identity_of(plan), found.manifest.identity)
    return found


def _newest(plan: LaunchPlan, snapshots: Snapshots) -> FoundSnapshot | None:
    found = snapshots.newest()
    if found is None and snapshots.any:
        refuse(_none(plan, "all of its snapshots are damaged", "damaged"))
    if found is None and plan.preempt.value.resume == "required":
        refuse(_none(plan, "no snapshot was taken in it", "missing"))
    if found is None:
        log(NONE_YET)
    return found


def _of_rank_0(ranks: Ranks | None, key: str, value: str) -> str:
    """Return rank 0's value on all ranks."""
    if ranks is None or ranks.world_size == 1:
        return value
    if ranks.rank == 0:
        ranks.store.set(key, value)
        return value
    with ranks.waits():
        published: bytes = ranks.store.get(key)
    return published.decode()


def _none(plan: LaunchPlan, why: str, slug: str) -> FasttrainError:
    return FasttrainError(
        f"there is no snapshot to resume from in {plan.run_dir}",
        why=why,
        fix="start the run without --resume, in a new run directory",
        slug=f"snapshot-{slug}",
    )


def untrusted(error: UntrustedError) -> FasttrainError:
    """Return the error for a folder into which others can write."""
    return FasttrainError(
        "the snapshots of this run can't be trusted",
        why=f"{error}, and a snapshot decides everything about the run that resumes from it",
        fix="make it your own with chown and chmod go-w, or use another run directory",
        slug="snapshot-untrusted",
    )


# The lever that takes snapshots of a run that can be preempted, and resumes from one.


class SnapshotLever:
    """Takes snapshots between two batches, and resumes a run from one."""

    def __init__(
        self,
        recorder: OutcomeRecorder,
        plan: LaunchPlan,
        rank: int,
        roots: RootCalls,
        meter: StepMeter,
        lever_state: LeverState,
    ) -> None:
        self.recorder = recorder
        self._plan, self._rank = plan, rank
        self._roots, self._meter = roots, meter
        self._ranks, self._lever_state = lever_state.ranks, lever_state
        self._snapshots = Snapshots(shared_folder(Path(plan.run_dir), lever_state.ranks))
        self._loop = LoopState(rank, roots, lever_state)
        every_min = plan.preempt.value.every_min
        self._writer = SnapshotWriter(self._snapshots, self._loop, rank, lever_state, every_min)
        self._replay = Replay(
            roots,
            self._loop.registry,
            self._loop.hooks,
            self._loop.outputs,
            self._loop.files_left,
        )
        self._silence = SilencedStdout()
        self._replaying, self._installed = ExitStack(), ExitStack()
        # Batches after which any optimizer made a step. An optimizer's own count won't do: where
        # two loops follow each other, the second one's optimizer counts from zero.
        self._steps = self._turn = 0
        self._timed = every_min is not None
        self._reported: set[str] = set()  # what no snapshot holds
        self._found: FoundSnapshot | None = None  # the snapshot that this run is replaying towards
        self._own: dict[str, Any] = {}  # this rank's part of that snapshot
        self._identity: dict[str, str] = {}

    def prepare(self, undo: ExitStack) -> None:
        """Install what has to run inside the other levers' wrappers; the rest runs outside."""
        strategy = self._plan.levers.strategy.value
        if self._ranks is not None and strategy.batch == "per-rank":
            self._loop.epochs.dealt = self._ranks.world_size
        self._loop.epochs.prepare(undo)

    def install(self, undo: ExitStack) -> None:
        """Track what the loop creates, reads and loads; resume from a snapshot if there is one.

        Raises:
            SystemExit: ``snapshot-…`` if no snapshot fits this run, or the one that does is
                unusable.
        """
        LEAVING.insist(undo)
        undo.callback(self._installed.close)
        with refusing_what_fails("it can't start"):
            self._follow(self._installed)

    def _follow(self, undo: ExitStack) -> None:
        self._loop.install(undo)
        undo.callback(self._replaying.close)
        self._roots.on_call.append(LEAVING.may_go_on)
        undo.callback(self._roots.on_call.remove, LEAVING.may_go_on)
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._meter.on_step.append(self._on_step)
        undo.callback(self._meter.on_step.remove, self._on_step)
        self._loop.epochs.on_turn = self._on_turn
        self.recorder.settle(State.ARMED, "no optimizer made a step")
        self._identity = identity_of(self._plan)
        self._found = find(self._plan, self._snapshots, self._ranks)
        if self._found is None:
            self._loop.begin()
        else:
            self._go_back(self._found, undo)

    def _go_back(self, found: FoundSnapshot, undo: ExitStack) -> None:
        """Start like the run that took the snapshot, and replay from its first step on."""
        self._own = self._loop.begin_again(found, undo)
        self._replay.trained = self._own["trained"]
        self._replay.install(self._replaying)
        self._lever_state.replayed = math.inf
        refusal.at_clean_end.append(self._never_arrived)
        undo.callback(refusal.at_clean_end.remove, self._never_arrived)
        self._log(
            f"replaying the loop up to step {found.manifest.step}, without computing, and without"
            " printing again what was printed before"
        )
        self._silence.begin()
        undo.callback(self._silence.end)

    def refresh(self) -> None:
        """Report that no snapshot can be taken if the script trains in other processes."""
        if self._loop.trained_apart:
            self.recorder.excuse(State.SKIPPED, TRAINED_APART)

    def leave_out_child(self) -> None:
        """Take out all of this in a forked child: the snapshots are its parent's alone."""
        self._silence.keep()
        self._installed.close()
        self._found = None
        self._lever_state.replayed = 0
        register_optimizer_step_post_hook(self._loop.note_apart)

    def finish(self) -> None:
        """Report whether the script has taken the signal since the second step."""
        if self.recorder.live and not self.recorder.counts[PREEMPTED]:
            self._leave_to_the_script()

    def _leave_to_the_script(self) -> bool:
        """Leave the signal to a script that handles it itself; return True if it does."""
        if not PREEMPT_SIGNAL.heard:
            self.recorder.cede("the script handles the signal itself")
        return not PREEMPT_SIGNAL.heard

    # --- steps

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        LEAVING.may_go_on()
        self._loop.stepping = True
        if torch._C._current_graph_task_id() != -1:
            refuse(_in_backward(type(optimizer).__name__))
        if closure_of(args, kwargs) is not None and not begins_with_closure(optimizer):
            refuse(_closure(type(optimizer).__name__))

    def _after_step(self, *_: Any) -> None:
        self._loop.stepping = False
        if self._turn != self._loop.epochs.turn:
            self._turn = self._loop.epochs.turn
            self._steps += 1
            self._loop.epochs.untrained = 0

    def _on_step(self, step: int) -> None:
        if step == 1:
            self._loop.checkpoints.begin()
            self._loop.files_left.begin_training()
            self._loop.tensors.begin()
            self._loop.reads.training = True
            if self._loop.epochs.earlier is not None:
                self._loop.epochs.earlier.replaying = True
                self._replay.begin(self._replaying)
        if step == 2:
            self._check_loop()

    def _check_loop(self) -> None:
        """Refuse a loop that can't be replayed, at the first step at which this is known."""
        if not self._loop.epochs.reading:
            refuse(_no_loader())
        if by := self._loop.epochs.stored_by():
            refuse(stored(by))
        try:
            self._snapshots.prepare()
            packed(shared_state(self._loop.registry), "the training state")
        except UntrustedError as error:
            refuse(untrusted(error))
        except NeedsPickleError as error:
            refuse(_unplain(error))
        except OSError as error:
            self._log(f"snapshots may fail to be written: {error}")
        if not self._leave_to_the_script():
            root = self._roots.last
            self.recorder.apply("training loop", root.where if root else "")

    # --- turns

    def _on_turn(self) -> None:
        LEAVING.may_go_on()
        if threading.current_thread() is not threading.main_thread():
            refuse_anywhere(_in_a_thread())
        if self._found is not None:
            if self._loop.epochs.turn == self._own["turn"]:
                self._arrive(self._found)
        elif (PREEMPT_SIGNAL.flag or self._timed) and self._is_due():
            self._take(self._steps)

    def _is_due(self) -> bool:
        may_take = self.recorder.live and self._loop.epochs.quiet
        return may_take and self._writer.due(self._steps)

    def _take(self, step: int) -> None:
        """Write a snapshot together with the other ranks, and exit if the run is preempted."""
        problem = self._writer.take(step, self._identity)
        if problem:
            text = f"the snapshot of step {step} could not be written"
            self._log(f"{text}; the run goes on: {problem}")
            self.recorder.note(f"{text}: {problem}")
            return
        self.recorder.counts["snapshots"] += 1
        self._report_limits()
        if self._writer.ends:
            self.recorder.counts[PREEMPTED] = 1
            self._log(f"{PREEMPTED_AFTER} {step}; the snapshot is in {self._plan.run_dir}")
            # torchrun's agent counts any other code as a failure; the launcher reads the report.
            end = SystemExit(0)
            LEAVING.begin(end)
            raise end

    def _report_limits(self) -> None:
        """Report what was too large to be kept, once, with a snapshot and in a resumed run."""
        found = []
        if self._loop.reads.left_out:
            found.append(
                "arrays that the script reads by .numpy() are too large to be kept, the first at"
                f" {self._loop.reads.left_out}: what a replay computes from them, such as a best"
                " metric, may be wrong"
            )
        if self._loop.epochs.numbers.full:
            found.append(
                "no more lengths and labels in batches are kept: in a replay they may not fit the"
                " tensors beside them"
            )
        for text in found:
            if text not in self._reported:
                self._reported.add(text)
                self._log(text)
                self.recorder.note(text)

    def _log(self, text: str) -> None:
        if self._rank == 0:
            log(text)

    # --- resuming

    def _arrive(self, found: FoundSnapshot) -> None:
        then, step = found.manifest.step, self._steps
        if step != then:
            refuse_diverged(f"it has made {step} steps, and had made {then} at this batch")
        with (
            refusing_what_fails(f"the snapshot {found.path.name} can't be restored"),
            torch.inference_mode(mode=False),  # tensors made inside it could not be trained
        ):
            self._loop.end_replay(self._own)
            self._replaying.close()
            self._loop.restore(found, self._own)
        self._found, self._own = None, {}
        self._lever_state.replayed = self._meter.steps
        self._silence.end()
        self._meter.reset_times()
        self._writer.begin_interval(step)
        self.recorder.note(f"went on from the snapshot of step {step}")
        self._report_limits()
        if self._replay.computed:
            self.recorder.note(f"the replay computed {self._replay.computed} calls of models")
        files = self._replay.files
        if files.left:
            self.recorder.note(f"the replay left files unchanged {files.left} times")
        with refusing_what_fails("what the replay has written can't be put right"):
            renamed = files.end()
        if renamed:
            self._log(f"put back under the names that they have now: {', '.join(renamed)}")
        self._log(f"{GOING_ON} {step}")

    def _never_arrived(self) -> None:
        if self._found is not None:
            refuse_diverged(f"it ended before step {self._found.manifest.step}")


def _no_loader() -> FasttrainError:
    return FasttrainError(
        "--preempt snapshot can't follow this loop",
        why="it made two optimizer steps without reading a DataLoader, and a snapshot can only be"
        " taken between two batches",
        fix="feed the loop from a DataLoader, or use --preempt signal and the script's own"
        " checkpoints",
        slug="snapshot-no-loader",
    )


def _in_a_thread() -> FasttrainError:
    return FasttrainError(
        "--preempt snapshot can't follow this loop",
        why="it reads its DataLoader in a separate thread while the main thread trains, so that no"
        " moment lies between two batches",
        fix="let the DataLoader's num_workers read ahead, or use --preempt signal",
        slug="snapshot-thread",
    )


def _closure(optimizer: str) -> FasttrainError:
    return FasttrainError(
        f"--preempt snapshot can't follow {optimizer} with a closure",
        why="the number of times that its step calls the closure depends on what the closure"
        " computes, and a replay computes nothing",
        fix="use --preempt signal and the script's own checkpoints",
        slug="snapshot-closure",
    )


def _in_backward(optimizer: str) -> FasttrainError:
    return FasttrainError(
        f"--preempt snapshot can't follow {optimizer} stepping inside the backward pass",
        why="hooks on gradients make its steps, and a resumed run would make some of them twice",
        fix="step after the backward pass, or use --preempt signal and the script's own"
        " checkpoints",
        slug="snapshot-step-in-backward",
    )


def _unplain(error: NeedsPickleError) -> FasttrainError:
    return FasttrainError(
        "--preempt snapshot can't save everything that this loop trains with",
        why=f"{error}, which could only be saved by pickling it, and loading a pickle can run code",
        fix="use --preempt signal and the script's own checkpoints",
        slug="snapshot-objects",
    )
