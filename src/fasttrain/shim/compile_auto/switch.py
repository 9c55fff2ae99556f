"""What a process under ``--compile auto`` does, whoever decides it: watch, switch, keep or drop."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fasttrain.files import write_private
from fasttrain.model.codec import dumps
from fasttrain.model.compile_auto import COMPILE_AUTO_FILE, Switched
from fasttrain.model.decision import Decision
from fasttrain.model.levers import Compile
from fasttrain.model.outcome import State
from fasttrain.shim.compile_auto.calls import (
    WATCHED_STEPS,
    Calls,
    CallsOfOne,
    CallsOfRank,
)
from fasttrain.shim.compile_auto.outlook import StepClock
from fasttrain.shim.compile_auto.peers import Peers, Ready, Steps
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder, Shared
from fasttrain.shim.hooks.roots import Root
from fasttrain.shim.levers.compile import shadow
from fasttrain.shim.levers.compile.lever import UNUSED, CompileLever, compile_once
from fasttrain.shim.levers.compile.repetitions import Form
from fasttrain.shim.levers.compile.targets import is_lazy, second_derivatives, uncompilable
from fasttrain.shim.process.held_signals import held_signals
from fasttrain.shim.tune.inner_calls import communicates
from fasttrain.statistics.paired import settled

NO_GRAPH = "dynamo made no graph"
MOST_AGAIN = 2  # compilations after the switch
AGAIN = "it had to be compiled again and again"


class SwitchedProcess(ABC):
    """Runs roots eagerly or compiled, as a program says that goes on after each step.

    Args:
        shared: What the levers share.
        decision: What was decided: how to compile.
        recorder: Records what becomes of it.
        peers: The other ranks, which do the same at the same steps.
    """

    leads = True  # whether this process writes the file of the run

    def __init__(
        self,
        shared: Shared,
        decision: Decision[Compile],
        recorder: OutcomeRecorder,
        peers: Peers,
    ) -> None:
        self.recorder = recorder
        recorder.explicit = False  # to stay eager is what was asked for, too
        self.lever = CompileLever(
            decision, recorder, shared.roots, shared.user_compile,
            strict=shared.plan.strict, same_draws=shared.plan.compares, later=True,
            once=compile_once(shared, recorder),
        )  # fmt: skip
        self._peers = peers
        self._later = ExitStack()  # undoes what is put in place after `install`
        self._shared, self._roots, self._meter = shared, shared.roots, shared.meter
        self._path = Path(shared.plan.run_dir) / COMPILE_AUTO_FILE
        self._owner = os.getpid()
        self._clock = StepClock()
        strategy = shared.plan.levers.strategy.value
        splits = strategy.injected and strategy.batch == "split"
        of_rank = CallsOfRank(shared.roots, splits=splits) if peers.several else None
        self._of_rank, self._heard = of_rank, of_rank or CallsOfOne(shared.roots)
        self._calls = Calls(self._heard.form)
        self._forms: dict[Root, Form] = {}
        self._named: list[Root] = []  # those that all ranks call in the same way
        self._on = False
        self._on_since_switch = False  # whether anything was given to the lever to compile
        self._has_switched = False  # whether a step was made since
        self._again = 0  # compilations since that one
        self._found = Switched("watching", "the run ended before its steps were known")
        self._idle = 0  # steps until the program goes on
        self._stepping = threading.Lock()
        self._program: Steps[None] | None = self._search()
        next(self._program)

    def install(self, undo: ExitStack) -> None:
        """Watch the calls of roots, and the steps."""
        self.lever.install(undo)
        undo.callback(self._later.close)
        self.recorder.settle(State.ARMED, UNUSED)
        # What the last report of a run says that is killed before anything was decided.
        self.recorder.excuse(State.SKIPPED, f"stayed eager: {self._found.reason}")
        self.recorder.on_reset.append(self._leave_to_parent)
        if self._shared.child:
            self._stay("a process that the script starts itself runs eagerly")
            return
        self._meter.on_step.append(self._after_step)
        self._meter.on_pass.append(self._after_step)
        self.lever.on_compiling.append(self._see_compiling)
        self._shared.on_final.append(self._finish)
        undo.callback(self._finish)

    def refresh(self) -> None:
        """Read dynamo's counters, once anything is compiled."""
        if self._has_switched and not self._is_given_up():
            self.lever.refresh()

    # Resumed after each step.

    def _after_step(self, _: int) -> None:
        self._clock.tick()
        if self._idle:
            self._idle -= 1
            return
        if self._program is None or os.getpid() != self._owner or self._is_given_up():
            return
        if self._meter.capturing:
            return
        if not self._stepping.acquire(blocking=False):
            return  # another thread of the script, which trains as well, ends a step
        try:
            # An exception of a handler of the script's is not one of the program's.
            with held_signals():
                self._resume(self._program)
        finally:
            self._stepping.release()

    def _resume(self, program: Steps[None]) -> None:
        try:
            self._idle = next(program) - 1
        except StopIteration:
            self._program = None
            self._meter.on_step = [f for f in self._meter.on_step if f != self._after_step]
            self._meter.on_pass = [f for f in self._meter.on_pass if f != self._after_step]
        except Exception as error:  # noqa: BLE001 - the script must go on without it
            self._program = None
            self._drop(f"{type(error).__name__}: {error}")

    def _is_given_up(self) -> bool:
        """True if the lever has released what was compiled: the script does what it can't."""
        if self._found.phase == "dropped":
            self._program = None
            return True
        if self._found.phase not in ("comparing", "kept") or not self._on_since_switch:
            return False
        if self.recorder.state is State.CEDED:
            self._program, self._on = None, False
            return True
        # Models that are gone, as at the end of the function that had them, were not released.
        if not self.lever.targets and any(root.ref() is not None for root in self._forms):
            self._program = None
            self._drop(self.recorder.outcome().reason)
            return True
        return False

    def _search(self) -> Steps[None]:
        yield 1  # the first step, which creates what later ones find
        if self._of_rank is not None:
            self._of_rank.install(self._later)
        plain_s = yield from self._watch()
        yield from self._decide(plain_s, self._ready())

    @abstractmethod
    def _decide(self, plain_s: float, ready: Ready) -> Steps[None]:
        """Do what is decided from now on.

        Args:
            plain_s: Time of a plain step.
            ready: What this process would compile.
        """

    def _watch(self) -> Steps[float]:
        """Return the time of a plain step, once it is settled and the calls are known."""
        self._heard.on_call.append(self._calls.see)
        times: list[float] = []
        while len(times) < WATCHED_STEPS or not settled(times):
            yield 1
            times.append(self._clock.taken_s)
            if len(times) == WATCHED_STEPS:
                self._hear_no_more(self._calls.see)
        return median(times[-WATCHED_STEPS:])

    def _ready(self) -> Ready:
        """Return what this process would compile."""
        why = self._why_not()
        if not why:
            self._forms, why = self._calls.usual(WATCHED_STEPS)
        self._named = list(self._forms)
        calls = [f"{root.name} ({root.where}): {form}" for root, form in self._forms.items()]
        return Ready(tuple(calls), why or self._why_not_modules())

    # Whether it is possible.

    def _why_not(self) -> str:
        own = self._shared.user_compile
        if own.where:
            return f"the script compiles {own.what} itself ({own.where})"
        if where := second_derivatives():
            return f"second derivatives (create_graph=True at {where}) can't be compiled"
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        if joined and not self._peers.several:
            return "the script has joined other processes, which would have to switch, too"
        if self._peers.several and not joined:
            return "the ranks have joined no process group, and may be at other steps"
        return ""

    def _why_not_modules(self) -> str:
        for root in self._forms:
            module = root.ref()
            if module is not None and (why := uncompilable(module)):
                return f"{root.name} ({root.where}): {why}"
            if module is not None and is_lazy(module):
                return f"{root.name} ({root.where}) isn't initialized"
            if module is not None and shadow.is_shared(module):
                return f"{root.name} ({root.where}) is in memory that other processes share"
            if self._peers.several and module is not None and (why := communicates(module)):
                return f"{root.name} ({root.where}): {why}"
        return ""

    # The switch, and what becomes of it.

    def _begin_comparing(self, plain_s: float = 0.0) -> None:
        self._set(
            replace(
                self._found,
                phase="comparing",
                reason="the run ended before it was known whether compiled steps are faster",
                from_step=self._meter.steps,
                plain_step_s=plain_s,
            )
        )

    def _begin(self) -> bool:
        """Have the next calls be compiled; return False if none can be."""
        self.recorder.excuse(State.ARMED, UNUSED)
        self.lever.begin(self._forms)
        if not self.lever.targets:
            self._stay(self.recorder.outcome().reason)
            return False
        self.recorder.settle(State.APPLIED, self._found.reason)
        self._on = self._on_since_switch = True
        self._heard.on_call.append(self._gate)
        return True

    def _gate(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run only calls compiled that were compiled in the background: no other stalls the run."""
        wanted = self._forms.get(root)
        module = root.ref()
        on = wanted is not None and module is not None and self._on
        self.lever.switch(on=on and self._heard.form(module, args, kwargs) == wanted)  # type: ignore[arg-type]

    def _keep(self, reason: str) -> None:
        self._on = True
        self.recorder.settle(State.APPLIED, reason)
        self._set(replace(self._found, phase="kept", reason=reason))

    def _drop(self, why: str, *, at_once: bool = True) -> None:
        """Run eagerly from now on."""
        self._on = False
        self._end_background()
        self.lever.switch(on=False)
        if self._has_switched:
            self.lever.refresh()  # once more, for what the receipt counts
        self._hear_no_more(self._gate)
        self._later.close()
        if at_once:
            self.lever.end()
        self.recorder.settle(State.SKIPPED, f"dropped: {why}")
        self._set(replace(self._found, phase="dropped", reason=why))
        self._peers.end("dropped", why)

    def _stay(self, why: str) -> None:
        """Stay eager."""
        self._later.close()
        self._program = None if self._shared.child else self._program
        own = self._shared.user_compile
        if own.where and self.recorder.state is State.ARMED:
            self.recorder.cede(f"the script compiles {own.what} itself", own.what, own.where)
        elif self.recorder.state is not State.CEDED:
            self.recorder.settle(State.SKIPPED, f"stayed eager: {why}")
        self._set(replace(self._found, phase="eager", reason=why))
        self._peers.end("eager", why)

    def _see_compiling(self, name: str) -> None:
        """Drop compilation after too many recompilations."""
        if not name or not self._has_switched or self._found.phase not in ("comparing", "kept"):
            return
        self._again += 1
        if self._again > MOST_AGAIN and not self._peers.object(AGAIN):
            # Not with torch as it was before: dynamo is at work.
            self._drop(AGAIN, at_once=False)

    # What the script does otherwise.

    def _leave_to_parent(self) -> None:
        """Do nothing more in a forked child; what its parent has compiled stays."""
        self._program = None

    def _finish(self) -> None:
        """End what runs in the background, at the end of the script."""
        if os.getpid() != self._owner:
            return
        self._end_background()
        if self._found.phase in ("watching", "compiling") and self.recorder.live:
            self.recorder.settle(State.SKIPPED, f"stayed eager: {self._found.reason}")
        elif self._found.phase == "comparing":
            self.recorder.reason = self._found.reason

    @abstractmethod
    def _end_background(self) -> None:
        """End what compiles in the background."""

    # What is told.

    def _hear_no_more(self, listener: Any) -> None:
        self._heard.on_call = [f for f in self._heard.on_call if f != listener]

    def _set(self, found: Switched) -> None:
        changed = found.phase != self._found.phase
        self._found = found
        if changed and self.leads:
            with suppress(OSError):  # a full disk must not end the script
                write_private(self._path, dumps(found), durable=False)
        if changed:
            self._note(found.phase, {"reason": found.reason})

    def _note(self, what: str, data: dict[str, Any]) -> None:
        self._shared.event({"compile_auto": {"what": what, **data}})
