"""The decision for each kind of call of a root, and when it has to be verified again."""

from __future__ import annotations

import weakref
from dataclasses import astuple, dataclass, field
from typing import Any

from torch.nn import Module

from fasttrain.shim.data_parallel.split.changes import Changes
from fasttrain.shim.data_parallel.split.decisions import NO_LIMITS, Decisions, Limits
from fasttrain.shim.data_parallel.split.ways import Split

FIRST = 4  # values of a place that are verified first; after them the 8th, 16th, ...
MOST_SEEN = 4096  # remembered per place


@dataclass(slots=True)
class Seen:
    """What earlier calls of a kind had: shapes, and values that a call may branch on.

    Each place has a count of its own: a counter, which has another value in each call, must not
    hide a flag that is set once.

    Attributes:
        of_places: The values at each place.
        classes: The `Limits.classes` of those of counters, each with its place.
        together: Values that were there in one call, but for places that had many.
        last: Those of the last call.
    """

    of_places: list[set[Any]] = field(default_factory=list)
    classes: set[Any] = field(default_factory=set)
    together: set[Any] = field(default_factory=set)
    last: tuple[Any, ...] = ()

    def note(self, values: tuple[Any, ...], limits: Limits) -> bool:
        """Note a call's values; return True if the call has to be verified for one of them."""
        if values == self.last:
            return False
        self.last = values
        self.of_places += [set() for _ in values[len(self.of_places) :]]
        new = [_noted(seen, value) for seen, value in zip(self.of_places, values, strict=False)]
        seldom = [
            value if len(seen) <= FIRST else None
            for seen, value in zip(self.of_places, values, strict=False)
        ]
        others = set()
        for at, (seen, value) in enumerate(zip(self.of_places, values, strict=False)):
            if type(value) is int and len(seen) > 1:
                others |= {(at, each) for each in limits.classes(value)}
        others -= self.classes
        self.classes |= others
        return _noted(self.together, tuple(seldom)) or any(new) or bool(others)


def _noted(seen: set[Any], value: Any) -> bool:
    if value in seen or len(seen) >= MOST_SEEN:
        return False
    seen.add(value)
    often = len(seen)
    return often <= FIRST or not often & (often - 1)


RETRIES = 4  # calls after which a refusal becomes final, even if numbers weren't wrong


@dataclass(slots=True)
class CallSite:
    """One kind of call of one root: its mode, and the kinds of its arguments.

    Attributes:
        calls: Number of calls.
        split: How it is split; None if it isn't.
        why_not: Why it isn't.
        final: True if no other way will be tried.
        few: True if the last call that was refused had few rows, which says nothing of others.
        name: The module, and the line at which its root was first called.
        verified: How often the split call agreed with the whole one.
        seen: What its calls had so far.
        most_rows: Number of rows of the largest verified batch.
        single: True if it was verified with a rank that had one row.
        decisions: Reads those values.
        hooks: Number of hooks registered anywhere at the last call.
        others: Modules that it may use without having them as parts.
        changes: What the split call changes in its modules; None before the first one.
        redone: How often a split call was made again, as it had changed more than verified ones.
    """

    name: str
    calls: int = 0
    split: Split | None = None
    why_not: str = ""
    final: bool = False
    few: bool = False
    verified: int = 0
    seen: Seen = field(default_factory=Seen)
    most_rows: int = 0
    single: bool = False
    hooks: int = 0
    others: list[weakref.ref[Module]] = field(default_factory=list)
    decisions: Decisions | None = None
    changes: Changes | None = None
    redone: int = 0

    def try_again(self) -> None:
        """Have the next call verified as the first one is."""
        self.calls, self.final, self.few = 0, False, False

    def is_due(
        self,
        values: tuple[Any, ...],
        rows: int = 0,
        fewest: int = 0,
        limits: Limits = NO_LIMITS,
        *,
        hooked: bool = False,
    ) -> bool:
        """Count a call; return True if it has to be verified.

        Args:
            values: The shapes of its arguments, and what else it may branch on, each at its place.
            rows: Number of rows of its batch.
            fewest: Smallest number of rows of any rank.
            limits: What counters among the values may be compared with.
            hooked: Whether hooks, modules or parameters were registered on what it uses.
        """
        self.calls += 1
        new = self.seen.note(values, limits)
        if self.final:
            return False
        again = new or not self.calls & (self.calls - 1)
        if self.split is None and self.why_not:
            return again and self.calls <= RETRIES
        # A part of a much larger batch may be what a whole one was so far: within a limit. With one
        # row, squeeze() drops the rows and a deviation is NaN.
        other = rows >= 2 * self.most_rows > 0 or (fewest == 1 and not self.single)
        return again or hooked or other


def saved(site: CallSite) -> dict[str, Any]:
    """Return a decision as a snapshot holds it."""
    split = site.split
    return {
        "calls": site.calls,
        "split": split and astuple(split),
        "why_not": site.why_not,
        "final": site.final,
        "few": site.few,
        "verified": site.verified,
        "most_rows": site.most_rows,
        "single": site.single,
        "seen": [list(map(_plain, seen)) for seen in site.seen.of_places],
        "classes": list(map(_plain, site.seen.classes)),
        "together": list(map(_plain, site.seen.together)),
    }


def _plain(value: Any) -> Any:
    """Return a value with tuples instead of shapes, and of what a snapshot makes of tuples."""
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def fill(site: CallSite, state: dict[str, Any]) -> None:
    """Restore a result of `saved`."""
    site.split = Split(*state["split"]) if state["split"] else None
    site.seen = Seen(
        [set(map(_plain, seen)) for seen in state["seen"]],
        set(map(_plain, state["classes"])),
        set(map(_plain, state["together"])),
    )
    for name in ("calls", "why_not", "final", "few", "verified", "most_rows", "single"):
        setattr(site, name, state[name])
