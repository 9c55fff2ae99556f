"""Snapshots of a run that can be preempted, and the way back to one.

A run that goes on from a snapshot begins as it began before, random numbers included. Up to its
first step all of it is real; from there to the batch before which the snapshot was taken it is
replayed: see `fasttrain.shim.snapshots.replay`. There everything gets the state that it had.
"""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.model.errors import FasttrainError
from fasttrain.model.guards import GOING_ON, PREEMPTED_BEHIND
from fasttrain.model.outcome import PREEMPTED, State
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.data_parallel.lever_state import Kept
from fasttrain.shim.hooks.outcome_recorder import Ledger
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.step_closures import begins_with_closure, closure_of
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.process import refusal
from fasttrain.shim.process.refusal import LEAVING, refuse, refuse_anywhere
from fasttrain.shim.snapshots.errors import refuse_diverged, refusing_what_fails, tell
from fasttrain.shim.snapshots.files import Found, NotOursError, Snapshots, UnplainError, packed
from fasttrain.shim.snapshots.loader_epochs import stored
from fasttrain.shim.snapshots.object_states import shared_state
from fasttrain.shim.snapshots.preempt_signal import ASKED
from fasttrain.shim.snapshots.replay import Replay, Silence
from fasttrain.shim.snapshots.resume import find, identity_of, not_ours, shared_folder
from fasttrain.shim.snapshots.training_state import Loop
from fasttrain.shim.snapshots.writer import Taking


class SnapshotLever:
    """Takes snapshots between two batches, and brings a run back to one."""

    def __init__(
        self,
        ledger: Ledger,
        plan: LaunchPlan,
        rank: int,
        roots: RootCalls,
        meter: StepMeter,
        kept: Kept,
    ) -> None:
        self.ledger = ledger
        self._plan, self._rank = plan, rank
        self._roots, self._meter, self._ranks, self._kept = roots, meter, kept.ranks, kept
        self._snapshots = Snapshots(shared_folder(Path(plan.run_dir), kept.ranks))
        self._loop = Loop(rank, roots, kept)
        self._taking = Taking(self._snapshots, self._loop, rank, kept, plan.preempt.value.every_min)
        self._replay = Replay(roots, self._loop.registry, self._loop.hooks)
        self._silence = Silence()
        self._replaying = ExitStack()
        # Batches behind which any optimizer made a step: of two loops, one behind the other, the
        # second one's optimizer counts from zero.
        self._steps = self._turn = 0
        self._timed = plan.preempt.value.every_min is not None
        self._found: Found | None = None  # the snapshot that this run is on its way to
        self._own: dict[str, Any] = {}  # of this rank, in that snapshot
        self._identity: dict[str, str] = {}

    def prepare(self, undo: ExitStack) -> None:
        """Do what has to be beneath the other levers; the rest is around them."""
        strategy = self._plan.levers.strategy.value
        if self._ranks is not None and strategy.batch == "per-rank":
            self._loop.passes.dealt = self._ranks.world_size
        self._loop.passes.prepare(undo)

    def install(self, undo: ExitStack) -> None:
        """Follow what the loop makes, reads and asks for; go back to a snapshot where there is one.

        Raises:
            SystemExit: ``snapshot-…`` when there is none to go on from that fits this run, or it
                can't be used.
        """
        LEAVING.insist(undo)
        with refusing_what_fails("it can't begin"):
            self._follow(undo)

    def _follow(self, undo: ExitStack) -> None:
        self._loop.install(undo)
        undo.callback(self._replaying.close)
        self._roots.on_call.append(LEAVING.may_go_on)
        undo.callback(self._roots.on_call.remove, LEAVING.may_go_on)
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._meter.on_step.append(self._on_step)
        undo.callback(self._meter.on_step.remove, self._on_step)
        self._loop.passes.on_turn = self._on_turn
        self.ledger.settle(State.ARMED, "no optimizer made a step")
        self._identity = identity_of(self._plan)
        self._found = find(self._plan, self._snapshots, self._ranks)
        if self._found is None:
            self._loop.begin()
        else:
            self._go_back(self._found, undo)

    def _go_back(self, found: Found, undo: ExitStack) -> None:
        """Begin as the run of a snapshot began, to be replayed from its first step on."""
        self._own = self._loop.begin_again(found, undo)
        self._replay.install(self._replaying)
        self._kept.replayed = math.inf
        refusal.at_clean_end.append(self._never_arrived)
        undo.callback(refusal.at_clean_end.remove, self._never_arrived)
        self._tell(
            f"replaying the loop up to step {found.manifest.step}, without computing it and"
            " without what it printed before"
        )
        self._silence.begin()
        undo.callback(self._silence.end)

    def refresh(self) -> None:
        """Nothing is pending: snapshots are counted as they are taken."""

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
        if self._turn != self._loop.passes.turn:
            self._turn = self._loop.passes.turn
            self._steps += 1
            self._loop.passes.untrained = 0

    def _on_step(self, step: int) -> None:
        if step == 1:
            self._loop.checkpoints.begin()
            self._loop.carried.begin()
            if self._loop.passes.earlier is not None:
                self._loop.passes.earlier.replaying = True
                self._replay.begin(self._replaying)
        if step == 2:
            self._judge()

    def _judge(self) -> None:
        """Tell as soon as it can be known whether the loop can be gone through again."""
        if not self._loop.passes.reading:
            refuse(_no_loader())
        if by := self._loop.passes.stored_by():
            refuse(stored(by))
        try:
            self._snapshots.prepare()
            packed(shared_state(self._loop.registry), "the training state")
        except NotOursError as error:
            refuse(not_ours(error))
        except UnplainError as error:
            refuse(_unplain(error))
        except OSError as error:
            self._tell(f"snapshots may not be written: {error}")
        if not ASKED.heard:
            self.ledger.cede("the script handles the signal itself")
        else:
            root = self._roots.last
            self.ledger.apply("training loop", root.where if root else "")

    # --- turns

    def _on_turn(self) -> None:
        LEAVING.may_go_on()
        if threading.current_thread() is not threading.main_thread():
            refuse_anywhere(_in_a_thread())
        if self._found is not None:
            if self._loop.passes.turn == self._own["turn"]:
                self._arrive(self._found)
        elif (ASKED.flag or self._timed) and self._may_take() and self._taking.due(self._steps):
            self._take(self._steps)

    def _may_take(self) -> bool:
        return self.ledger.live and self._loop.passes.quiet

    def _take(self, step: int) -> None:
        """Write a snapshot with the other ranks, and leave where that was asked for."""
        problem = self._taking.take(step, self._identity)
        if problem:
            self._tell(f"no snapshot of step {step} could be written; the run goes on: {problem}")
            self.ledger.note(f"no snapshot of step {step} could be written: {problem}")
            return
        self.ledger.counts["snapshots"] += 1
        if self._taking.ends:
            self.ledger.counts[PREEMPTED] = 1
            self._tell(f"{PREEMPTED_BEHIND} {step}; the snapshot is in {self._plan.run_dir}")
            # To torchrun's agent any other code is a failure; the launcher reads the report.
            end = SystemExit(0)
            LEAVING.begin(end)
            raise end

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            tell(text)

    # --- the way back

    def _arrive(self, found: Found) -> None:
        then, step = found.manifest.step, self._steps
        if step != then:
            refuse_diverged(f"it has made {step} steps where it had made {then}")
        with (
            refusing_what_fails(f"the snapshot {found.path.name} can't be put back"),
            torch.inference_mode(mode=False),  # what is made in it could not be trained
        ):
            self._loop.stand(self._own)
            self._replaying.close()
            self._loop.restore(found, self._own)
        self._found, self._own = None, {}
        self._kept.replayed = self._meter.steps
        self._silence.end()
        self._meter.reset_times()
        self._taking.begin_interval(step)
        self.ledger.note(f"went on from the snapshot of step {step}")
        files = self._replay.files
        if files.left:
            self.ledger.note(f"files left as they were in the replay: {files.left} times")
        if emptied := files.end():
            self._tell(f"empty now, because what was saved in them is gone: {', '.join(emptied)}")
        self._tell(f"{GOING_ON} {step}")

    def _never_arrived(self) -> None:
        if self._found is not None:
            refuse_diverged(f"it ended before step {self._found.manifest.step}")


def _no_loader() -> FasttrainError:
    return FasttrainError(
        "--preempt snapshot can't follow this loop",
        why="it has made two optimizer steps without a DataLoader, between whose batches a snapshot"
        " could be taken",
        fix="feed the loop by a DataLoader, or use --preempt signal and checkpoints of the"
        " script's own",
        slug="snapshot-no-loader",
    )


def _in_a_thread() -> FasttrainError:
    return FasttrainError(
        "--preempt snapshot can't follow this loop",
        why="it reads its DataLoader in a thread of its own, while the main thread trains: there is"
        " no moment between two batches",
        fix="leave the reading ahead to the DataLoader's num_workers, or use --preempt signal",
        slug="snapshot-thread",
    )


def _closure(optimizer: str) -> FasttrainError:
    return FasttrainError(
        f"--preempt snapshot can't follow {optimizer} with a closure",
        why="how often its step calls the closure follows from what is computed there, and a"
        " replay computes nothing",
        fix="use --preempt signal and checkpoints of the script's own",
        slug="snapshot-closure",
    )


def _in_backward(optimizer: str) -> FasttrainError:
    return FasttrainError(
        f"--preempt snapshot can't follow {optimizer} stepping inside the backward pass",
        why="its steps are made by hooks on gradients, of which a part would be made again",
        fix="step behind the backward pass, or use --preempt signal and checkpoints of the"
        " script's own",
        slug="snapshot-step-in-backward",
    )


def _unplain(error: UnplainError) -> FasttrainError:
    return FasttrainError(
        "--preempt snapshot can't keep all that this loop trains with",
        why=f"{error}, which could only be kept by pickling it, and what is pickled can run code",
        fix="use --preempt signal and checkpoints of the script's own",
        slug="snapshot-objects",
    )
