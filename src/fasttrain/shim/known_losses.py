"""What was found for the losses of a rank, for as long as they are there."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor

KEPT = 64  # losses, before those that are gone are looked for


@dataclass(slots=True)
class Weighed:
    """One loss of this rank.

    Attributes:
        factor: What its gradient is to be multiplied by before the ranks average.
        value: The loss over all ranks, on the loss's device; None where it was not asked for.
    """

    factor: Tensor | float = 1.0
    value: Tensor | None = None


class KnownLosses:
    """Keeps what each loss has come to, and no loss alive."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], Weighed]] = {}
        self._most = KEPT

    def get(self, loss: Tensor) -> Weighed | None:
        """Give what was found for a loss before."""
        found = self._found.get(id(loss))
        return found[1] if found is not None and found[0]() is loss else None

    def keep(self, loss: Tensor, weighed: Weighed) -> None:
        """Keep what was found for a loss."""
        if len(self._found) > self._most:
            there = {key: each for key, each in self._found.items() if each[0]() is not None}
            self._found, self._most = there, 2 * len(there) + KEPT
        self._found[id(loss)] = (weakref.ref(loss), weighed)
