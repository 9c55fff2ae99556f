"""What was found about one kind of call, and when it is to be verified again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fasttrain.shim.data_parallel.split.decisions import Decisions
from fasttrain.shim.data_parallel.split.ways import Split

SHAPES = 4  # new shapes of one kind of call that are verified; behind them 8, 16, ... of them
MOST_SHAPES = 4096  # that are remembered
RETRIES = 4  # calls up to which a reason other than wrong numbers may go away


@dataclass(slots=True)
class Site:
    """One kind of call of one root: its mode, and the kinds of its arguments.

    Attributes:
        calls: How often it was called.
        split: How it is split; None where it isn't.
        why_not: Why it isn't.
        final: Whether no other way will be tried.
        name: The module, and where its root was called first.
        verified: How often the split call was found to be the whole one.
        shapes: Of the arguments, with what the call may decide by, as far as they were met.
        decisions: What that is.
        hooks: Hooks that had been registered anywhere when it was verified.
    """

    name: str
    calls: int = 0
    split: Split | None = None
    why_not: str = ""
    final: bool = False
    verified: int = 0
    shapes: set[Any] = field(default_factory=set)
    hooks: int = -1
    decisions: Decisions | None = None

    def is_due(self, shapes: Any, hooks: int) -> bool:
        """Count a call, and return whether it is to be verified."""
        self.calls += 1
        new = shapes not in self.shapes and len(self.shapes) < MOST_SHAPES
        if new:
            self.shapes.add(shapes)
        if self.final:
            return False
        often = len(self.shapes)
        again = not self.calls & (self.calls - 1) or (
            new and (often <= SHAPES or not often & (often - 1))
        )
        if self.split is None and self.why_not:
            return again and self.calls <= RETRIES
        return again or hooks != self.hooks


def saved(site: Site) -> dict[str, Any]:
    """Return what a snapshot holds of what was found."""
    split = site.split
    return {
        "calls": site.calls,
        "split": split and [split.inputs, split.outputs, split.kept, split.inner, split.same],
        "why_not": site.why_not,
        "final": site.final,
        "verified": site.verified,
        "shapes": [(tuple(map(tuple, shapes)), values) for shapes, values in site.shapes],
    }


def fill(site: Site, state: dict[str, Any]) -> None:
    """Go on from what `saved` returned."""
    site.split = Split(*state["split"]) if state["split"] else None
    site.shapes = {
        (tuple(map(torch.Size, shapes)), tuple(values)) for shapes, values in state["shapes"]
    }
    for name in ("calls", "why_not", "final", "verified"):
        setattr(site, name, state[name])
