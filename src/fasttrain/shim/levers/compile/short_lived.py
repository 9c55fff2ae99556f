"""Modules that are gone after some calls, which are not worth a compilation each."""

from __future__ import annotations

from fasttrain.shim.hooks.roots import Root
from fasttrain.shim.levers.compile.slots import Filling

MADE_AGAIN = "is made again and again"

# A script that makes a new wrapper at each step, or a copy for each task, would compile each.
MOST_OF_A_KIND = 3
# The compilation of even a tiny module takes as long as thousands of its calls.
FEW_CALLS = 100


class ShortLived:
    """Counts compiled roots that are gone after a few calls, by class and line of the first call.

    A model per fold of a cross-validation is called often, and the members of an ensemble live on.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, str], list[tuple[Root, Filling]]] = {}

    def add(self, root: Root, filling: Filling) -> None:
        """Remember a compiled root."""
        kind = self._compiled.setdefault((root.name, root.where), [])
        kind[:] = [(r, f) for r, f in kind if r.ref() is not None or f.calls <= FEW_CALLS]
        kind.append((root, filling))

    def reason(self, root: Root) -> str:
        """Return why another root of this kind is to run eagerly; empty if it can be compiled."""
        kind = self._compiled.get((root.name, root.where), [])
        gone = sum(r.ref() is None and f.calls <= FEW_CALLS for r, f in kind)
        if gone < MOST_OF_A_KIND:
            return ""
        return f"a new {root.name} {MADE_AGAIN}; each would be compiled for itself"
