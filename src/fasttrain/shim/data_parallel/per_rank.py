"""Deals whole batches of the script's DataLoaders out to the ranks: ``--batch per-rank``.

Every rank runs the script's samplers and so sees the indices of every batch, but only reads its own
batches. So the ranks divide the epoch, and one step of N ranks trains on N of the script's batches.
A loader that feeds no training is read whole on every rank.

Source: ``torch/utils/data/dataloader.py`` of torch 2.13, ``_BaseDataLoaderIter``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fasttrain.model.outcome import State
from fasttrain.shim.data_parallel.context import ParallelContext
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.seams import Loading
from fasttrain.shim.process.callsite import call_site

# Distance between the ranks' base seeds: more than a loader has workers, which add their numbers,
# and small enough for the 32 bits that torch's CPU generator uses of a seed.
_SEED_STEP = 2**16


class DataLoaderLever:
    """Deals out the batches in every epoch over a DataLoader that feeds training."""

    def __init__(self, recorder: OutcomeRecorder, context: ParallelContext) -> None:
        self.recorder = recorder
        self._ranks = context.ranks
        self._streams = context.streams
        self._training = context.training
        self._dealt: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators
        # True if the loader fed training when it was last read.
        self._feeds: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def install(self, undo: ExitStack) -> None:
        """Wrap the creation of DataLoader iterators and each of their batches."""
        iterator: Any = _BaseDataLoaderIter
        acts = {"__init__": self._make, "_reset": self._begin, "__next__": self._next}
        for name, act in acts.items():
            patching.wrap(iterator, name, self._while_live(act), undo, Loading.RANKS)
        patching.wrap(DataLoader, "__len__", self._while_live(self._length), undo)
        self.recorder.settle(State.ARMED, "no DataLoader fed any training")
        self.recorder.excuse(State.SKIPPED, "no DataLoader feeds the training")

    def refresh(self) -> None:
        """Do nothing: every batch is counted as it is yielded."""

    def _while_live(self, act: Any) -> patching.Make:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def replaced(holder: Any, *args: Any, **kwargs: Any) -> Any:
                if not self.recorder.live or get_worker_info() is not None:
                    return original(holder, *args, **kwargs)
                return act(original, holder, *args, **kwargs)

            return replaced

        return make

    def _make(self, original: Any, iterator: Any, loader: Any) -> None:
        self._begin(original, iterator, loader)
        if iterator in self._dealt:
            # Augmentations in the loader's worker processes must differ between ranks.
            iterator._base_seed += self._ranks.rank * _SEED_STEP

    def _begin(self, original: Any, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        with self._streams.shared():
            original(iterator, loader, *args, **kwargs)
        where = call_site()
        why_not = self._training.why_not_training()
        self._feeds[loader] = not why_not
        if why_not:
            self.recorder.touch(f"whole on every rank, {why_not}", where)
        elif isinstance(loader.dataset, IterableDataset):
            self.recorder.pass_over(
                f"DataLoader ({where})", "its dataset makes the batches, all of them on every rank"
            )
        else:
            self._dealt.add(iterator)
            iterator._sampler_iter = self._deal(iterator._sampler_iter)
            self.recorder.apply("DataLoader", where)
            self._read_apart(iterator)

    def _deal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's batches of indices; repeat the last one if none is left for it."""
        drawn = self._drawn(batches)
        while hand := list(islice(drawn, self._ranks.world_size)):
            yield hand[min(self._ranks.rank, len(hand) - 1)]

    def _drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the script's batches of indices, drawn from the shared random stream."""
        while True:
            with self._streams.shared():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _read_apart(self, iterator: Any) -> None:
        """Have samples that this process reads draw from the rank's own random stream."""
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if fetcher is None:
            return
        fetch, streams = fetcher.fetch, self._streams

        def fetch_apart(index: Any) -> Any:
            with streams.for_samples():
                return fetch(index)

        fetcher.fetch = fetch_apart

    def _next(self, original: Any, iterator: Any) -> Any:
        data = original(iterator)
        if iterator in self._dealt:
            self.recorder.counts["batches"] += 1
        return data

    def _length(self, original: Any, loader: Any) -> int:
        """Return one rank's number of batches; an unread loader that shuffles is taken to train."""
        length: int = original(loader)
        if isinstance(loader.dataset, IterableDataset):
            return length  # all ranks read all of it
        shuffles = not isinstance(loader.sampler, SequentialSampler)
        trains = self._feeds.get(loader, shuffles)
        return -(-length // self._ranks.world_size) if trains else length
