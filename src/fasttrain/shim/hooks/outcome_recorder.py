"""The account of one lever while the worker runs; frozen into an `Outcome` for each report."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Protocol

from fasttrain.model.outcome import Outcome, Site, State

MAX_SITES = 50
MAX_NOTES = 20


class Ledger:
    """What one lever was asked, what became of it, where and how often.

    Attributes:
        live: Whether the lever still acts: it is installed and has neither ceded nor failed.
    """

    def __init__(self, lever: str, asked: str, *, explicit: bool) -> None:
        self.lever = lever
        self.asked = asked
        self.explicit = explicit
        self.state = State.OFF
        self.live = False  # kept, because some levers ask several times a step
        self.reason = ""
        self._unfit = self._unfit_note = ""
        self._missed: dict[str, None] = {}
        self._excuse: tuple[State, str] | None = None
        self.counts: Counter[str] = Counter()
        self._sites: Counter[tuple[str, str]] = Counter()
        self._notes: dict[str, None] = {}

    def settle(self, state: State, reason: str = "") -> None:
        """Set the state and why."""
        self.state = state
        self.reason = reason
        self.live = state in (State.ARMED, State.APPLIED)

    def begin_anew(self) -> None:
        """Forget what was done so far, in a process that takes the lever over from its parent."""
        if self.state is State.APPLIED:
            self.settle(State.ARMED, "nothing that it applies to was met")
        self.counts.clear()
        self._sites.clear()
        self._notes.clear()
        self._missed.clear()

    def apply(self, what: str, where: str, count: int = 1) -> None:
        """Record one effect; the first one turns armed into applied."""
        if self.state is State.ARMED:
            self.settle(State.APPLIED)
        self.touch(what, where, count)

    def pass_over(self, what: str, why: str, *, missed: bool = False) -> None:
        """Record something that the lever can't be applied to; alone, it makes it skipped.

        Args:
            what: The object and its place.
            why: The reason.
            missed: Whether a person who named the lever is warned of it, even where it was applied
                to others.
        """
        self._unfit_note = f"{what} left alone: {why}"
        self.note(self._unfit_note)
        self._unfit = f"{what}: {why}"
        if missed and len(self._missed) < MAX_NOTES:
            self._missed[self._unfit] = None

    def excuse(self, state: State, reason: str) -> None:
        """Say how it ends if it is never used and nothing better is known."""
        self._excuse = (state, reason)

    def cede(self, reason: str, what: str = "", where: str = "") -> None:
        """Step back because the script does this lever's work itself, at ``where``."""
        self.settle(State.CEDED, f"{reason} ({where})" if where else reason)
        if what:
            self.touch(what, where)

    def touch(self, what: str, where: str, count: int = 1) -> None:
        """Count a site without changing the state."""
        if (what, where) in self._sites or len(self._sites) < MAX_SITES:
            self._sites[(what, where)] += count

    def note(self, text: str) -> None:
        """Keep one detail for the receipt; repeated ones are kept once."""
        if len(self._notes) < MAX_NOTES:
            self._notes[text] = None

    def outcome(self) -> Outcome:
        """Return the account as it stands."""
        state, reason, notes = self.state, self.reason, list(self._notes)
        if state is State.ARMED and self._unfit:
            state, reason = State.SKIPPED, self._unfit
            notes = [note for note in notes if note != self._unfit_note]  # once is enough
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

    ledger: Ledger

    def install(self, undo: ExitStack) -> None:
        """Put the change in place, pushing the inverse of each step on ``undo``."""

    def refresh(self) -> None:
        """Bring the ledger up to date before it is reported."""
