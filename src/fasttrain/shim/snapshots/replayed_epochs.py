"""Passes over DataLoaders that are gone through again: batches without reading, up to a place.

A batch is one of the same loader that was seen before, made to look like the batch of that turn.
Behind the replay the loader itself is brought to where it was.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import IterableDataset

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.hooks.casting import map_tensors
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.snapshots.batch_signature import made_like
from fasttrain.shim.snapshots.errors import refuse_diverged, refuse_other, tell
from fasttrain.shim.snapshots.random_states import alike, same
from fasttrain.shim.snapshots.samplers import is_torchs, without_generators

if TYPE_CHECKING:
    from fasttrain.shim.snapshots.loader_epochs import LoaderPasses

# One pass over a DataLoader, as far as it has come.


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
        """Return what a later process makes it from."""
        return self.loader, self.reads, self.start, self.batches, self.looks, self.ended, self.end

    def of(self, iterator: Any) -> None:
        """Belong to an iterator, and need no start any more once it is gone or at its end."""
        self.iterator = weakref.ref(iterator, self.leave)

    def leave(self, *_: Any) -> None:
        """Forget where it began."""
        self.iterator = self.start = self.reads_from = None

    def walk(self) -> Iterator[int]:
        """Yield the number of each batch's look."""
        for at in range(0, len(self.looks), 2):
            yield from repeat(self.looks[at], self.looks[at + 1])


class EarlierPasses:
    """The passes of the run before, in their order.

    Attributes:
        replaying: Whether batches are those that were seen before.
        list: The passes.
    """

    def __init__(self, passes: list[Pass], looks: list[Any]) -> None:
        self.replaying = False
        self.list = passes
        self._seen: dict[int, Any] = {}  # a batch of each loader
        self._looks = looks
        self._to_come: dict[int, Iterator[int]] = {}  # looks of the batches of each pass

    def meet(self, number: int, reads: str) -> None:
        """See that a pass begins where one began then, over the same data.

        Raises:
            SystemExit: ``snapshot-diverged`` or ``snapshot-mismatch`` where it doesn't.
        """
        if number >= len(self.list):
            refuse_diverged("it begins a pass over a DataLoader that it did not begin then")
        then = self.list[number].reads
        if reads != then:
            refuse_other(f"a DataLoader gives {reads}, and gave {then}")

    def keep(self, loader: int, data: Any) -> None:
        """Remember a batch of a loader."""
        self._seen.setdefault(loader, map_tensors(data, Tensor.clone))

    def again(self, begun: Pass, number: int, read_one: Callable[[], Any]) -> Any:
        """Return a batch like the one of this turn.

        Args:
            begun: The pass as far as it has come.
            number: Its number.
            read_one: Gives a batch of its loader, where none was seen yet.

        Raises:
            StopIteration: The pass ended here.
            SystemExit: ``snapshot-diverged`` when there was no such batch.
        """
        then = self.list[number]
        if begun.batches == then.batches:
            if then.ended:
                begun.end = then.end
                raise StopIteration
            refuse_diverged("it asks a DataLoader for more batches than it did then")
        if begun.loader not in self._seen:
            self.keep(begun.loader, read_one())
        if number not in self._to_come:
            self._to_come[number] = islice(then.walk(), begun.batches, None)
        return made_like(self._seen[begun.loader], self._looks[next(self._to_come[number])])


class Replayed:
    """The iterator of a pass that began in a replay; it outlives the replay."""

    def __init__(self, passes: LoaderPasses, loader: Any, begun: Pass, number: int) -> None:
        self._passes, self._loader, self._dataset = passes, loader, loader.dataset
        self._begun, self._number = begun, number
        replaying = passes.earlier is not None and passes.earlier.replaying
        self._real: Any = None if replaying else passes.made(loader)

    def __iter__(self) -> Replayed:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        return self._passes.take(self._begun, Replayed._read, self)

    def _read(self) -> Any:
        begun, earlier = self._begun, self._passes.earlier
        if earlier is not None and earlier.replaying:
            self._real = None  # with its worker processes
            return earlier.again(begun, self._number, self._read_one)
        if begun.ended:
            raise StopIteration
        if self._real is None:
            self._real = self._come_to_its_place()
        data = next(self._real)
        if earlier is not None:  # before the replay begins: it will need one
            earlier.keep(begun.loader, data)
        return data

    def _read_one(self) -> Any:
        with self._passes.states_kept(self._loader):
            return next(self._passes.made(self._loader))

    def _come_to_its_place(self) -> Any:
        """Return an iterator that stands where the pass was.

        Raises:
            SystemExit: ``snapshot-order`` where its order can't be drawn again.
        """
        passes, loader, begun = self._passes, self._loader, self._begun
        # Worker processes, and datasets that are iterated, only come to a place by going there.
        reads = loader.num_workers > 0 or isinstance(loader.dataset, IterableDataset)
        with passes.states_kept(loader):
            now = passes.states_of(loader)
            passes.put(loader, begun.start["made"])
            iterator = passes.made(loader)
            if "first" in begun.start and not loader.num_workers:
                passes.put(loader, begun.start["first"])
            if reads and begun.batches:
                tell(f"reading {begun.batches} batches again, to come to where the loader was")
            go = functools.partial(next if reads else passes.leave_out, iterator)
            if begun.batches:
                self._go(go, now)
        return iterator

    def _go(self, go: Callable[[], Any], now: dict[str, Any]) -> None:
        """Go on to the place.

        Args:
            go: Comes one batch further.
            now: The states of the generators when the pass had come there.
        """
        loader, states = self._loader, self._passes.states_of
        go()
        behind_the_first = states(loader)
        for _ in range(1, self._begun.batches):
            go()
        there = states(loader)
        # If nothing is drawn between two batches, others may have drawn there; else they may not.
        if not (_same(behind_the_first, there) or _same(there, now)):
            sampler = loader.batch_sampler if loader.sampler is None else loader.sampler
            data = isinstance(loader.dataset, IterableDataset)
            refuse(_order(type(loader.dataset if data else sampler).__name__))
        kept = [without_generators(one["own"]) for one in (there, now)]
        if not (alike(*kept) or (is_torchs(loader.batch_sampler) and is_torchs(loader.sampler))):
            refuse_diverged("a sampler was changed while it was being read")


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return same(one["all"], other["all"]) and alike(one["own"], other["own"])


def _order(kind: str) -> FasttrainError:
    return FasttrainError(
        "the run can't go on from its snapshot",
        why=f"{kind} draws random numbers between two batches, and so did the loop, from the same"
        " generator: which batches come next can't be found again",
        fix="let it draw from a generator of its own, such as torch.Generator().manual_seed(0);"
        " without --resume the run begins anew",
        slug="snapshot-order",
    )


def places(passes: list[Pass]) -> list[tuple[int, int]]:
    """Return how far passes have come."""
    return [(begun.loader, begun.batches) for begun in passes]
