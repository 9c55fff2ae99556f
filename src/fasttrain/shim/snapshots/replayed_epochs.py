"""Replays epochs over DataLoaders: yields batches without reading data, up to a given batch.

A replayed batch is a copy of the loader's first batch, brought to the shapes that the batch had
at this turn. After the replay the loader itself is advanced to where it was.
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
from fasttrain.shim.data_parallel.random_streams import alike
from fasttrain.shim.hooks.containers import map_tensors
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.snapshots.batches import is_torchs, made_like, without_generators
from fasttrain.shim.snapshots.files import log, refuse_diverged, refuse_mismatch
from fasttrain.shim.snapshots.object_states import same

if TYPE_CHECKING:
    from fasttrain.shim.snapshots.loader_epochs import LoaderEpochs


@dataclass(slots=True, eq=False)
class Epoch:
    """One epoch over a loader, from ``iter()`` on.

    Attributes:
        loader: Number of the loader, in the order in which loaders were first read.
        reads: What the loader reads, in words.
        start: States of the generators at its start; None once nobody can continue it.
        batches: Number of batches so far.
        signatures: Signatures of the batches, run-length encoded: a signature's number and then how
            many batches in a row have it, and so on.
        ended: True if the loader was exhausted.
        end: States of the generators after its last batch, if the script drew random numbers
            before the next epoch began: it may have made that epoch's data from them.
        iterator: Weak reference to its iterator.
        signature: Signature of the last batch.
        reads_from: The loader itself, as long as somebody can continue the epoch.
    """

    loader: int
    reads: str = ""
    start: Any = None
    batches: int = 0
    signatures: list[int] = field(default_factory=list)
    ended: bool = False
    end: Any = None
    iterator: Any = None
    signature: Any = None
    reads_from: Any = None

    def fields(self) -> tuple[Any, ...]:
        """Return the positional arguments from which a later process creates it again."""
        return (
            self.loader,
            self.reads,
            self.start,
            self.batches,
            self.signatures,
            self.ended,
            self.end,
        )

    def of(self, iterator: Any) -> None:
        """Attach it to an iterator; once that is gone or exhausted, the start is dropped."""
        self.iterator = weakref.ref(iterator, self.leave)

    def leave(self, *_: Any) -> None:
        """Drop what is needed to continue it."""
        self.iterator = self.start = self.reads_from = None

    def walk(self) -> Iterator[int]:
        """Yield the number of each batch's signature."""
        for at in range(0, len(self.signatures), 2):
            yield from repeat(self.signatures[at], self.signatures[at + 1])


class EarlierEpochs:
    """The epochs of the run that took the snapshot, in order.

    Attributes:
        replaying: True once batches are copies of ones that were seen before.
        list: The epochs.
    """

    def __init__(self, epochs: list[Epoch], signatures: list[Any]) -> None:
        self.replaying = False
        self.list = epochs
        self._seen: dict[int, Any] = {}  # a batch of each loader
        self._signatures = signatures
        self._to_come: dict[int, Iterator[int]] = {}  # signatures of the batches left, by epoch

    def meet(self, number: int, reads: str) -> None:
        """Check that an epoch begins where one began then, over the same data.

        Raises:
            SystemExit: ``snapshot-diverged`` or ``snapshot-mismatch`` if not.
        """
        if number >= len(self.list):
            refuse_diverged("it begins an epoch over a DataLoader that it did not begin then")
        then = self.list[number].reads
        if reads != then:
            refuse_mismatch(f"a DataLoader reads {reads}, and read {then}")

    def keep(self, loader: int, data: Any) -> None:
        """Keep a copy of a loader's first batch, as the model for replayed ones."""
        self._seen.setdefault(loader, map_tensors(data, Tensor.clone))

    def again(self, epoch: Epoch, number: int, read_one: Callable[[], Any]) -> Any:
        """Return a batch with the signature that this turn's batch had.

        Args:
            epoch: The epoch so far.
            number: Its number.
            read_one: Reads a batch of its loader, called if none was seen yet.

        Raises:
            StopIteration: If the epoch ended here.
            SystemExit: ``snapshot-diverged`` if there was no such batch.
        """
        then = self.list[number]
        if epoch.batches == then.batches:
            if then.ended:
                epoch.end = then.end
                raise StopIteration
            refuse_diverged("it asks a DataLoader for more batches than it did then")
        if epoch.loader not in self._seen:
            self.keep(epoch.loader, read_one())
        if number not in self._to_come:
            self._to_come[number] = islice(then.walk(), epoch.batches, None)
        return made_like(self._seen[epoch.loader], self._signatures[next(self._to_come[number])])


class ReplayedIterator:
    """The iterator of an epoch that began in a replay; the script goes on with it afterwards."""

    def __init__(self, epochs: LoaderEpochs, loader: Any, epoch: Epoch, number: int) -> None:
        self._epochs, self._loader, self._dataset = epochs, loader, loader.dataset
        self._collate_fn = loader.collate_fn
        self._begun, self._number = epoch, number
        replaying = epochs.earlier is not None and epochs.earlier.replaying
        self._real: Any = None if replaying else epochs.made(loader)

    def __iter__(self) -> ReplayedIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        return self._epochs.take(self._begun, ReplayedIterator._read, self)

    def _read(self) -> Any:
        epoch, earlier = self._begun, self._epochs.earlier
        if earlier is not None and earlier.replaying:
            self._real = None  # and stop its worker processes
            return earlier.again(epoch, self._number, self._read_one)
        if epoch.ended:
            raise StopIteration
        if self._real is None:
            self._real = self._advanced()
        data = next(self._real)
        if earlier is not None:  # real reading before the replay, which will need a batch
            earlier.keep(epoch.loader, data)
        return data

    def _read_one(self) -> Any:
        with self._epochs.states_kept(self._loader):
            return next(self._epochs.made(self._loader))

    def _advanced(self) -> Any:
        """Return an iterator of the loader whose next batch is the epoch's next one.

        Raises:
            SystemExit: ``snapshot-order`` if the same order can't be drawn again.
        """
        epochs, loader, epoch = self._epochs, self._loader, self._begun
        # Worker processes and iterable datasets can't skip: their batches have to be read.
        reads = loader.num_workers > 0 or isinstance(loader.dataset, IterableDataset)
        with epochs.states_kept(loader):
            now = epochs.states_of(loader)
            epochs.put(loader, epoch.start["made"])
            iterator = epochs.made(loader)
            if "first" in epoch.start and not loader.num_workers:
                epochs.put(loader, epoch.start["first"])
            if reads and epoch.batches:
                log(f"reading {epoch.batches} batches again to advance the loader to its position")
            advance = functools.partial(next if reads else epochs.leave_out, iterator)
            if epoch.batches:
                self._advance(advance, now)
        return iterator

    def _advance(self, advance: Callable[[], Any], now: dict[str, Any]) -> None:
        """Advance to the epoch's position.

        Args:
            advance: Moves one batch further.
            now: The states of the generators when the epoch had reached this position.
        """
        loader, states = self._loader, self._epochs.states_of
        advance()
        after_first = states(loader)
        for _ in range(1, self._begun.batches):
            advance()
        there = states(loader)
        # A sampler that draws nothing between batches is right whatever the loop drew meanwhile.
        # One that draws must end at the same state, which it only does if the loop drew nothing.
        if not (_same(after_first, there) or _same(there, now)):
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
        why=f"{kind} draws random numbers between two batches, and the loop drew from the same"
        " generator: the next batches can't be determined again",
        fix="let it draw from its own generator, such as torch.Generator().manual_seed(0);"
        " without --resume the run starts from the beginning",
        slug="snapshot-order",
    )


def positions(epochs: list[Epoch]) -> list[tuple[int, int]]:
    """Return the loader and the number of batches of each epoch."""
    return [(epoch.loader, epoch.batches) for epoch in epochs]
