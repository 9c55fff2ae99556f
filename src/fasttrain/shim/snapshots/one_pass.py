"""One pass over a DataLoader, as far as it has come."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over a loader, from ``iter()`` on.

    Attributes:
        loader: Number of the loader, in the order in which they were first read.
        reads: What it reads, in words.
        start: States of the generators when it began; None once nobody can go on with it.
        batches: Batches that were handed out.
        looks: What they looked like: numbers of looks, each behind it how many batches had it.
        ended: Whether the loader had no more.
        end: States of the generators behind its last batch, where the script drew random numbers
            before the next pass began: it may have made the data of that one by them.
        iterator: Refers to its iterator, for as long as that lives.
        look: What the last one looked like.
        reads_from: The loader itself, for as long as somebody can go on with the pass.
    """

    loader: int
    reads: str = ""
    start: Any = None
    batches: int = 0
    looks: list[int] = field(default_factory=list)
    ended: bool = False
    end: Any = None
    iterator: Any = None
    look: Any = None
    reads_from: Any = None

    def fields(self) -> tuple[Any, ...]:
        """Give what a later process makes it from."""
        return self.loader, self.reads, self.start, self.batches, self.looks, self.ended, self.end

    def of(self, iterator: Any) -> None:
        """Belong to an iterator, and need no start any more once it is gone or at its end."""
        self.iterator = weakref.ref(iterator, self.leave)

    def leave(self, *_: Any) -> None:
        """Forget where it began."""
        self.iterator = self.start = self.reads_from = None

    def walk(self) -> Iterator[int]:
        """Give the number of each batch's look."""
        for at in range(0, len(self.looks), 2):
            yield from repeat(self.looks[at], self.looks[at + 1])
