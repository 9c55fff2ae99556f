"""Installs the levers of one worker, and reports on them while it runs and at its end."""

from __future__ import annotations

import atexit
import math
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fasttrain.model.decision import Decision
from fasttrain.model.levers import LEVERS
from fasttrain.model.outcome import Outcome, RankReport, State, StepStats
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.proof import ALIKE, Proof
from fasttrain.model.tuning import Tuning
from fasttrain.shim import multiprocessing_hooks
from fasttrain.shim.data_parallel.context import LeverState
from fasttrain.shim.data_parallel.rank_consistency import refuse_unrelated_copies
from fasttrain.shim.hooks import own_device, patching
from fasttrain.shim.hooks.dynamo import UserCompile
from fasttrain.shim.hooks.outcome_recorder import Lever, OutcomeRecorder, Shared
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.process import entry, true_clock
from fasttrain.shim.process.callsite import is_shim_code, is_shim_file, own_prefixes
from fasttrain.shim.reporter import Clock, Reporter
from fasttrain.shim.watch.heartbeat import Heartbeat
from fasttrain.shim.watch.nan_guard import NanGuard
from fasttrain.shim.watch.save_guard import SaveGuard

# Makes warnings that point at a line of the shim's point at the user's line instead.
#
# ``warnings.warn(..., stacklevel=3)`` in a forward points at the caller of its caller. Under
# plain python that is torch's ``Module.__call__``; here it may be a function of the shim's, and a
# warning of torch's or of the script's would look like one of fasttrain's.


def name_users_lines(undo: ExitStack) -> None:
    """Format such warnings with the place in the user's code; no-op where the script formats."""
    # Not `formatwarning`: if that is replaced, Python leaves out where an unclosed file was opened.
    patching.wrap(warnings, "_formatwarnmsg_impl", _naming_users, undo)


def _naming_users(original: Any) -> Any:
    def format_warning(warning: Any) -> str:
        place = warning.filename, warning.lineno
        if is_shim_file(warning.filename) and (frame := _user_of(*place)) is not None:
            warning = copy(warning)
            warning.filename, warning.lineno = frame.f_code.co_filename, frame.f_lineno
            warning.line = None
        return str(original(warning))

    return format_warning


def hide_own_frames(undo: ExitStack) -> None:
    """Leave the shim's frames out of stacks and tracebacks that the script or torch prints.

    Such as by ``logging`` with ``stack_info``, `traceback.print_exc` around a call of the model,
    and torch's anomaly detection, whose stack of a forward call is that of the process.
    """
    name = "_extract_from_extended_frame_gen"  # what all functions of the module go through
    patching.wrap(traceback.StackSummary, name, _without_own_frames, undo)


def _without_own_frames(original: Any) -> Any:
    def extract(kind: type[Any], /, frames: Iterator[tuple[FrameType, Any]], **how: Any) -> Any:
        # Walked through right here: `walk_stack(None)` counts the callers up to its user's frame.
        walked = list(frames)
        users = (one for one in walked if not is_shim_code(one[0].f_code))
        return original.__func__(kind, users, **how)

    return classmethod(extract)


def _user_of(filename: str, line: int) -> FrameType | None:
    """Return the user's frame that called, directly or not, a line of the shim's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (filename, line):
        frame = frame.f_back
    prefixes = own_prefixes()
    while frame is not None and frame.f_code.co_filename.startswith(prefixes):
        frame = frame.f_back
    return frame


# Installs the levers of one worker, and reports on them while it runs and at its end.


REPORT_EVERY_S = 5.0  # a killed worker leaves a report that is at most this old
_AT_ROOTS = frozenset(name for name, row in LEVERS.items() if row.at_roots)
_BY_ROOTS = _AT_ROOTS | {"preempt"}  # or need to know whether one is running
EVENT_EVERY_S = 0.5  # fine enough for a progress line, and nothing against a step


class Runtime:
    """Installs the plan's levers and writes the rank's events and report.

    Args:
        plan: The plan.
        rank: Global rank of the worker.
        started_s: When the worker started, by `time.perf_counter`.
        child: Whether the script started this process, and not the launcher.
    """

    def __init__(
        self, plan: LaunchPlan, rank: int, started_s: float, *, child: bool = False
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._undo = ExitStack()
        self._roots = RootCalls()
        self._own_compile = UserCompile()
        self._meter = StepMeter(started_s)
        self._recorders: list[OutcomeRecorder] = []
        self._levers: list[Lever] = []
        self._lever_state = LeverState()
        self._shared = Shared(
            *(plan, self._roots, self._own_compile, self._meter, self._lever_state, self._undo),
            companion=self._recorder,
            on_compiling=[self._note_compiling],
            child=child,
            event=self._note_of_lever,
        )
        self._reported_s = self._event_s = 0.0
        self._started_s = started_s
        self._in_child: list[Callable[[], None]] = []  # called in each forked child
        self._tuner: Any = None
        self._prover: Any = None
        self._snapshots: Any = None
        self._comparing = threading.RLock()  # several threads of the script may make steps
        self._run_dir = Path(plan.run_dir)
        self._reporter = Reporter(self._run_dir, rank, child=child)
        self._heartbeat = Heartbeat(self._run_dir, rank, child=child)
        self._clock = Clock()
        self._saves = SaveGuard()
        self._nan = NanGuard(plan.guards.nan.value, self._scale_may_fall)

    def install(self) -> None:
        """Install every lever; one that fails is rolled back alone, and the script goes on."""
        if self._plan.tuning is not None:
            import_module("fasttrain.shim.tune.repetition")  # takes functions as torch has them
        # First, so that the levers are around it: a save that only rank 0 makes needs no space on
        # this rank.
        self._saves.install(self._undo)
        for lever in self._build():
            with ExitStack() as steps:
                try:
                    lever.install(steps)
                except Exception as error:  # noqa: BLE001 - the script must go on without it
                    lever.recorder.settle(State.FAILED, f"{type(error).__name__}: {error}")
                    continue
                self._undo.push(steps.pop_all())
                self._levers.append(lever)
        for tell in self._shared.on_installed:
            tell()
        live = {lever.recorder.lever for lever in self._levers if lever.recorder.live}
        if live & _AT_ROOTS:
            self._roots.on_call += [self._meter.throughput.called, self._on_call]
            self._roots.on_call.append(self._heartbeat.beat)
        if live & _BY_ROOTS or self._plan.proof is not None:  # a control rounds in them
            self._roots.install(self._undo)
        if self._plan.guards.hang.value.on:
            self._heartbeat.install(self._undo)
        # After the levers: loss scaling's hook first puts the gradients of a skipped step back.
        self._nan.install(self._undo)
        refuse_unrelated_copies(self._plan, self._undo)
        self._meter.install(self._undo)
        self._meter.on_step.append(self._on_step)
        self._meter.before_next.append(self._end_at)
        self._meter.on_pass.append(self._on_step)
        if self._reporter.child:
            multiprocessing_hooks.at_exit(self.finish)
        else:
            self._begin_comparing()
        hide_own_frames(self._undo)
        if any(lever.recorder.live for lever in self._levers):
            self._own_compile.install(self._undo)
            name_users_lines(self._undo)
            multiprocessing_hooks.follow_forked(self._reset_in_child)
        # Registered before any handler of the script's, so that it runs after all of them.
        atexit.register(self.finish)
        self._undo.callback(atexit.unregister, self.finish)
        self._report(finished=False)

    def close(self) -> None:
        """Undo `install`."""
        self._undo.close()

    def _build(self) -> list[Lever]:
        build: list[Lever] = []
        for name, row in LEVERS.items():
            if row.several and (self._world_size() == 1 or self._reporter.child):
                continue
            decision: Decision[Any] = getattr(self._plan.levers, name)
            mode = row.mode(decision.value)
            recorder = self._recorder(name, mode, decision, explicit=decision.source.explicit)
            if mode in row.ceded:
                recorder.cede(decision.reason)
            for module in row.workers.get(mode, ()):
                build += import_module(module).build(self._shared, decision, recorder)
        if self._plan.preempt.value.mode == "snapshot" and not self._reporter.child:
            self._snapshots = self._snapshot_lever()
            build.append(self._snapshots)
        if self._plan.loader_workers is not None and not self._reporter.child:
            build.append(self._lent_workers(self._plan.loader_workers))
        return build

    def _begin_comparing(self) -> None:
        if self._plan.tuning is not None:
            self._tuner = self._tune(self._plan.tuning)
        if self._plan.proof is not None:
            self._prover = self._prove(self._plan.proof)

    def _tune(self, asked: Tuning) -> Any:
        from fasttrain.shim.tune.ranks import agreement
        from fasttrain.shim.tune.repeats import Repeats
        from fasttrain.shim.tune.tuner import Tuner

        levers: dict[str, Any] = {}
        rounds: dict[str, float] = {}
        for lever in self._levers:
            name, mode = lever.recorder.lever, lever.recorder.asked
            if lever.recorder.live and name in LEVERS and mode in LEVERS[name].switched:
                levers[name], rounds[name] = lever, LEVERS[name].switched[mode]
        several, state = self._world_size() > 1, self._lever_state
        collectives = self._plan.levers.strategy.value.collectives
        ranks = agreement(state, collectives, self._meter, self._started_s, several=several)
        repeats = Repeats(self._roots, state.apart if several else None)
        tuner = Tuner(asked, levers, rounds, self._meter, repeats, self._run_dir, ranks)
        tuner.install(self._undo)
        return tuner

    def _prove(self, asked: Proof) -> Any:
        from fasttrain.shim.process.turns import of_this_worker
        from fasttrain.shim.prove.prover import Prover
        from fasttrain.shim.prove.rounded import RandomRounding, Rounding

        torch.manual_seed(asked.seed)
        state = self._lever_state
        prover = Prover(
            *(of_this_worker(), self._meter, self._heartbeat.beat),
            draws=lambda: state.streams is not None and state.streams.drew,
        )
        if asked.rounding:
            mode = RandomRounding(asked.rounding, asked.errors)
            rounding = Rounding(mode, lambda: prover.steps >= ALIKE)
            rounding.install(self._roots, self._undo)
        prover.install(self._undo)
        return prover

    def _snapshot_lever(self) -> Lever:
        from fasttrain.shim.snapshots.lever import SnapshotLever

        preempt = self._plan.preempt
        recorder = self._recorder("preempt", "snapshot", preempt, explicit=preempt.source.explicit)
        lever = SnapshotLever(
            recorder, self._plan, self._rank, self._roots, self._meter, self._lever_state
        )
        lever.prepare(self._undo)
        self._in_child.append(lever.leave_out_child)
        return lever

    def _lent_workers(self, decision: Decision[int]) -> Lever:
        from fasttrain.shim.levers.loader_workers import lever as loader_workers

        explicit = decision.source.explicit
        name, asked = loader_workers.NAME, str(decision.value)
        recorder = self._recorder(name, asked, decision, explicit=explicit)
        return loader_workers.build(decision, recorder)

    def _recorder(
        self, name: str, asked: str, decision: Decision[Any], *, explicit: bool
    ) -> OutcomeRecorder:
        recorder = OutcomeRecorder(name, asked, explicit=explicit)
        recorder.settle(State.OFF if explicit else State.SKIPPED, decision.reason)
        self._recorders.append(recorder)
        return recorder

    def outcomes(self, *, final: bool = True) -> dict[str, Outcome]:
        """Return what became of each lever so far, by its name.

        Args:
            final: Whether to wait for counts that a device still has.
        """
        for wait in self._shared.on_final if final else ():
            wait()
        for lever in self._levers:
            lever.refresh()
        self._excuse_unused()
        ranks = (recorder for recorder in self._recorders if recorder.lever == "strategy")
        for recorder in ranks:
            for text in own_device.overruled:
                recorder.note(text)
        return {recorder.lever: recorder.outcome() for recorder in self._recorders}

    def _excuse_unused(self) -> None:
        """Set why levers found nothing to do, if the script compiles its model itself."""
        own = self._own_compile
        for recorder in self._recorders if own.where else ():
            if recorder.lever == "compile":
                recorder.excuse(State.CEDED, f"the script compiles {own.what} itself ({own.where})")
            else:
                reason = f"the script's work is inside {own.what}, which it compiles itself"
                recorder.excuse(State.SKIPPED, f"{reason} ({own.where})")
        amp = next(recorder for recorder in self._recorders if recorder.lever == "amp").outcome()
        for recorder in self._recorders:
            if recorder.lever == "loss_scaling" and amp.state is State.SKIPPED:
                recorder.excuse(State.SKIPPED, f"nothing runs in fp16: {amp.reason}")

    def _reset_in_child(self) -> None:
        """Start the record of a forked child from zero: what its parent did is in its own."""
        self._tuner = self._prover = None
        self._reporter = Reporter(self._run_dir, self._rank, child=True)
        self._meter.reset()
        self._nan.reset()
        self._roots.last = None
        for act in self._in_child:
            act()
        for recorder in self._recorders:
            recorder.reset()
        multiprocessing_hooks.at_exit(self.finish)

    def _on_call(self, *_: Any) -> None:
        # A script without an optimizer may make no step, and the first one may be an epoch away.
        if true_clock.perf_counter() - self._reported_s >= REPORT_EVERY_S:
            self._report(finished=False)

    def _on_step(self, step: int) -> None:
        if step > self._lever_state.replayed:
            self._heartbeat.step(step)
        else:
            self._heartbeat.beat()  # progress, but the launcher counts new steps only
        now = true_clock.perf_counter()
        if now - self._event_s >= EVENT_EVERY_S or step == 1:
            self._event_s = now
            self._note_event()
            self._nan.read()
        if now - self._reported_s >= REPORT_EVERY_S or step == 1:
            self._report(finished=False)
        compared = self._tuner is not None or self._prover is not None
        if compared and not self._meter.capturing:
            with self._comparing:
                self._compare()
        # With several optimizers the others may not have stepped in this iteration yet.
        if not self._meter.several:
            self._end_at(step)

    def _compare(self) -> None:
        """Go on with what is compared, while other threads that end a step wait."""
        if self._tuner is not None:
            self._tuner.after_step()
            if self._tuner.done:
                sys.exit(0)
        if self._prover is not None:
            self._prover.after_step()

    def _end_at(self, step: int) -> None:
        most = self._plan.max_steps
        if most is not None and step >= most and step > self._lever_state.replayed:
            sys.exit(0)

    def finish(self) -> None:
        """Write the last event and report."""
        if self._tuner is not None:
            self._tuner.finish()
        if self._prover is not None:
            self._prover.finish()
        if self._snapshots is not None:
            self._snapshots.finish()
        self._heartbeat.end()
        if self._meter.steps:
            self._note_event()
        self._report(finished=True)

    def _report(self, *, finished: bool) -> None:
        self._reported_s = true_clock.perf_counter()
        # Most children only load data or start a tool; only those that train have a report.
        if self._meter.steps or self._roots.last is not None or not self._reporter.child:
            self._reporter.report(lambda: self._rank_report(finished))

    def _scale_may_fall(self) -> bool:
        """True if gradients may overflow because of the loss scale alone, which starts high."""
        scale = self._shared.loss_scale
        return scale is not None and scale() >= 1.0

    def _note_event(self) -> None:
        event = self._event()
        self._reporter.event(lambda: event)

    def _note_compiling(self, name: str) -> None:
        now = self._clock.read(self._meter.steps)
        self._reporter.event(lambda: {**now, "compiling": name})

    def _note_of_lever(self, data: dict[str, Any]) -> None:
        now = self._clock.read(self._meter.steps)
        self._reporter.event(lambda: {**now, "at_step": self._meter.steps, **data})

    def _event(self) -> dict[str, Any]:
        stats = self._meter.stats(0.0, self._device())
        # The first step's time includes start-up, but is the only one until the second step.
        self._heartbeat.slow_step(stats.p95_step_s or stats.first_step_s)
        return {
            **self._clock.read(self._meter.steps),
            "step": self._meter.steps,
            "step_s": self._meter.recent_step_s(),
            "samples_per_s": stats.samples_per_s * self._world_size(),  # if the others are as fast
            "memory_bytes": stats.peak_memory_bytes,
            "loss_scale": self._shared.loss_scale() if self._shared.loss_scale else 1.0,
        }

    def _rank_report(self, finished: bool) -> RankReport:
        stats = self._meter.stats(self._shared.compile_s(), self._device())
        return RankReport(
            rank=self._rank,
            device=self._device(),
            torch_version=torch.__version__,
            outcomes=tuple(self.outcomes(final=finished).values()),
            stats=self._with_resumed(stats),
            finished=finished,
            warnings=(*self._nan.warnings, *self._saves.warnings, *self._clock.warnings),
        )

    def _device(self) -> str:
        # The last root that was called: at exit most models are gone with the function they are in.
        root = self._roots.last
        return self._meter.device or (root.device if root else "")

    def _world_size(self) -> int:
        return 1 if self._plan.processes.value.backend == "direct" else _world_size()

    def _with_resumed(self, stats: StepStats) -> StepStats:
        """Return the statistics with the steps of a replay set apart.

        While the replay goes on, nothing was trained yet.
        """
        replayed = self._lever_state.replayed
        if math.isinf(replayed):
            return replace(stats, steps=0)
        return replace(stats, resumed_from=int(replayed))


def _world_size() -> int:
    """Return the number of ranks of this attempt, which varies in an elastic run."""
    return int(entry.get("WORLD_SIZE", "1"))
