"""Records what becomes of one lever while the worker runs; each report holds it as `Outcome`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.optim import Optimizer

from fasttrain.model.outcome import Outcome, Site, State
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.hooks.dynamo import UserCompile
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.steps import StepMeter

MAX_SITES = 50
MAX_NOTES = 20


class OutcomeRecorder:
    """Records what was asked of one lever, what became of it, where and how often.

    Attributes:
        live: Whether the lever still acts: it is installed, has not failed, and was not left to the
            script.
        on_reset: Called when what was recorded is forgotten.
    """

    def __init__(self, lever: str, asked: str, *, explicit: bool) -> None:
        self.lever = lever
        self.asked = asked
        self.explicit = explicit
        self.state = State.OFF
        self.live = False  # stored, because some levers read it several times a step
        self.reason = ""
        self._unfit = self._unfit_note = ""
        self._missed: dict[str, None] = {}
        self._excuse: tuple[State, str] | None = None
        self.counts: Counter[str] = Counter()
        self._sites: Counter[tuple[str, str]] = Counter()
        self._notes: dict[str, None] = {}
        self.on_reset: list[Callable[[], None]] = []

    def settle(self, state: State, reason: str = "") -> None:
        """Set the state and why."""
        self.state = state
        self.reason = reason
        self.live = state in (State.ARMED, State.APPLIED)

    def reset(self) -> None:
        """Forget what was recorded, in a forked child: its parent's work is not its own."""
        if self.state is State.APPLIED:
            self.settle(State.ARMED, "it found nothing to apply to")
        self.counts.clear()
        self._sites.clear()
        self._notes.clear()
        self._missed.clear()
        for reset in self.on_reset:
            reset()

    def apply(self, what: str, where: str, count: int = 1) -> None:
        """Record one effect; the first one turns armed into applied."""
        if self.state is State.ARMED:
            self.settle(State.APPLIED)
        self.touch(what, where, count)

    def pass_over(self, what: str, why: str, *, missed: bool = False) -> None:
        """Record something that the lever can't be applied to.

        If the lever is applied to nothing else either, its state becomes skipped.

        Args:
            what: The object and its place.
            why: The reason.
            missed: Whether a user who asked for the lever by name is warned, even if it was applied
                to other objects.
        """
        self._unfit_note = f"{what} left alone: {why}"
        self.note(self._unfit_note)
        self._unfit = f"{what}: {why}"
        if missed and len(self._missed) < MAX_NOTES:
            self._missed[self._unfit] = None

    def take_up(self, what: str) -> None:
        """Take back what `pass_over` has recorded of an object: the lever is applied to it now."""
        for notes, told in ((self._notes, f"{what} left alone: "), (self._missed, f"{what}: ")):
            for note in [note for note in notes if note.startswith(told)]:
                del notes[note]
        if self._unfit.startswith(f"{what}: "):
            self._unfit = self._unfit_note = ""

    def excuse(self, state: State, reason: str) -> None:
        """Set the state and reason of a lever that is never used, if no better reason is known."""
        self._excuse = (state, reason)

    def cede(self, reason: str, what: str = "", where: str = "") -> None:
        """Leave the lever's work to the script, which does it itself at ``where``."""
        self.settle(State.CEDED, f"{reason} ({where})" if where else reason)
        if what:
            self.touch(what, where)

    def touch(self, what: str, where: str, count: int = 1) -> None:
        """Count a site without changing the state."""
        if (what, where) in self._sites or len(self._sites) < MAX_SITES:
            self._sites[(what, where)] += count

    def note(self, text: str) -> None:
        """Add one detail to the receipt, unless it is there already."""
        if len(self._notes) < MAX_NOTES:
            self._notes[text] = None

    def outcome(self) -> Outcome:
        """Return the lever's outcome so far."""
        state, reason, notes = self.state, self.reason, list(self._notes)
        if state is State.ARMED and self._unfit:
            state, reason = State.SKIPPED, self._unfit
            notes = [note for note in notes if note != self._unfit_note]  # the reason says it
        elif state is State.ARMED and self._excuse:
            state, reason = self._excuse
        return Outcome(
            lever=self.lever,
            asked=self.asked,
            state=state,
            reason=reason,
            explicit=self.explicit,
            sites=tuple(Site(what, where, n) for (what, where), n in self._sites.items()),
            counts=dict(self.counts),
            notes=tuple(notes),
            missed=tuple(self._missed),
        )


class Lever(Protocol):
    """One reversible change in the worker."""

    recorder: OutcomeRecorder

    def install(self, undo: ExitStack) -> None:
        """Put the change in place, pushing the inverse of each step on ``undo``."""

    def refresh(self) -> None:
        """Bring the recorder up to date before it is reported."""


# What the levers of one worker share, from which each is built.


@dataclass(slots=True)
class Shared:
    """Handed to the ``build(shared, decision, recorder)`` of each module that a lever's row names.

    Attributes:
        plan: The plan.
        roots: Calls of roots.
        user_compile: What the script compiles itself.
        meter: Steps and their times.
        lever_state: What a snapshot has to hold: a ``LeverState`` of ``data_parallel``.
        undo: Takes away what is put in place before the levers are installed.
        companion: Makes the recorder of a part with a line of its own in the receipt, by its name,
            what is asked of it, the decision that it follows, and whether a person named it.
        on_installed: Called once all levers are installed, for hooks at a step that go by what the
            hooks of other levers have made of it.
        on_final: Called before outcomes that are the last: counts may be waited for that a device
            still has.
        on_compiling: Called with the name of a root when compiling begins in it, and with an empty
            one when that has ended.
        compile_s: Seconds spent compiling so far.
        loss_scale: The loss scale, late by a few steps; None without loss scaling.
        stepped_elsewhere: Each true of an optimizer whose steps another lever makes.
        child: Whether the script started this process.
        event: Adds a line to the events.
    """

    plan: LaunchPlan
    roots: RootCalls
    user_compile: UserCompile
    meter: StepMeter
    lever_state: Any
    undo: ExitStack
    companion: Callable[..., OutcomeRecorder]
    on_installed: list[Callable[[], None]] = field(default_factory=list)
    on_final: list[Callable[[], None]] = field(default_factory=list)
    on_compiling: list[Callable[[str], None]] = field(default_factory=list)
    compile_s: Callable[[], float] = lambda: 0.0
    loss_scale: Callable[[], float] | None = None
    stepped_elsewhere: list[Callable[[Optimizer], bool]] = field(default_factory=list)
    child: bool = False
    event: Callable[[dict[str, Any]], None] = lambda _: None
