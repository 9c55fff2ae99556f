"""Cuts the batches of the script's DataLoaders among the ranks.

Every rank runs the script's samplers and so sees the indices of every batch, but reads only its
own part: together, and in the same order, the ranks train on what one process would have trained
on. Batches that were put together by the dataset are read by all and cut behind. A loader that
feeds no training is left whole on every rank, so that what the script computes from it is what
one process computes; so is one whose batches can't be cut.

Source: ``torch/utils/data/dataloader.py`` of torch 2.13, ``_BaseDataLoaderIter``.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fasttrain.shim.callsite import call_site
from fasttrain.shim.ledger import Ledger
from fasttrain.shim.parallel_context import ParallelContext
from fasttrain.shim.shares import Share, cut_data, cut_indices, deal_batches
from fasttrain.spec.outcome import State

# Between the ranks' workers: more than a loader has of its own, and not beyond the 32 bits that
# torch's generator on the CPU takes of a seed.
_SEED_STEP = 2**16


Purpose = Literal["train", "evaluate", "unknown"]


class _Pass:
    """One pass over a loader, from ``iter()`` on.

    Attributes:
        where: Where the script began it.
        shares: What the ranks have of the batches that were asked for and not yet handed out.
        purpose: ``train``; ``evaluate``, whose batches stay whole; or ``unknown``, whose first
            batch stays whole and shows it.
        slices: Whether the batches are cut behind their reading.
    """

    def __init__(self, where: str, purpose: Purpose) -> None:
        self.where = where
        self.purpose = purpose
        self.shares: deque[Share | None] = deque()
        self.slices = False
        self.wrapped = False
        self.handed_out = 0


class DataLoaderLever:
    """Takes part in every pass over a DataLoader."""

    def __init__(self, ledger: Ledger, context: ParallelContext) -> None:
        self.ledger = ledger
        self._batch = context.strategy.batch
        self._ranks = context.ranks
        self._streams = context.streams
        self._training = context.training
        self._batches = context.batches
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._trainings: set[str] = set()  # where passes have shown to be for training
        self._evaluations: set[str] = set()
        # Whether a loader fed training when it was last read
        self._feeds: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def install(self, undo: ExitStack) -> None:
        """Follow the iterators of DataLoaders from their beginning to each batch."""
        iterator: Any = _BaseDataLoaderIter
        self._replace(iterator, "__init__", self._make, undo)
        self._replace(iterator, "_reset", self._begin, undo)
        self._replace(iterator, "__next__", self._next, undo)
        if self._batch == "per-rank":
            self._replace(DataLoader, "__len__", self._length, undo)
        self.ledger.settle(State.ARMED, "no DataLoader fed any training")
        self.ledger.excuse(State.SKIPPED, "no DataLoader feeds the training")

    def refresh(self) -> None:
        """Nothing is pending: every batch is counted as it is handed out."""

    def _replace(self, owner: Any, name: str, act: Any, undo: ExitStack) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def replaced(holder: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.ledger.live or get_worker_info() is not None:
                return original(holder, *args, **kwargs)
            return act(original, holder, *args, **kwargs)

        undo.callback(setattr, owner, name, original)
        setattr(owner, name, replaced)

    def _make(self, original: Any, iterator: Any, loader: Any) -> None:
        self._begin(original, iterator, loader)
        begun = self._passes.get(iterator)
        if begun is not None and begun.purpose != "evaluate" and not begun.slices:
            # Augmentations in the loader's own processes must differ from rank to rank.
            iterator._base_seed += self._ranks.rank * _SEED_STEP

    def _begin(self, original: Any, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        with self._streams.shared():
            original(iterator, loader, *args, **kwargs)
        where = call_site()
        why_not = self._training.why_not_training() or self._managed(loader)
        begun = self._passes[iterator] = _Pass(where, self._purpose(loader, where, why_not))
        if begun.purpose == "evaluate":
            self._feeds[loader] = False
            self.ledger.touch(f"whole on every rank, {why_not or 'nothing was trained'}", where)
            return
        self._feeds[loader] = True
        if isinstance(loader.dataset, IterableDataset):
            begun.slices = True
        else:
            iterator._sampler_iter = self._cut(iterator._sampler_iter, begun)

    def _purpose(self, loader: Any, where: str, why_not: str) -> Purpose:
        """Tell what a pass is for; one in a fixed order may be a validation in disguise."""
        if why_not or where in self._evaluations:
            return "evaluate"
        plain = type(loader.batch_sampler) is BatchSampler
        fixed = plain and isinstance(loader.sampler, SequentialSampler)
        known = where in self._trainings or self._batch == "per-rank"
        return "unknown" if fixed and not known else "train"

    def _managed(self, loader: Any) -> str:
        """Give why a loader is to be left alone though it may feed training."""
        if getattr(loader, "in_order", True) is False:
            return "its batches come in no order"
        return ""

    def _cut(self, batches: Iterator[Any], begun: _Pass) -> Iterator[Any]:
        """Give the rank's part of each batch of indices, noting it for when it is handed out."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        if self._batch == "per-rank":
            for batch, share in deal_batches(self._drawn(batches), rank, world_size):
                begun.shares.append(share)
                yield batch
            return
        for batch in self._drawn(batches):
            if begun.purpose != "train":
                begun.shares.append(None)
                yield batch
                continue
            if not isinstance(batch, list | tuple):
                begun.slices = True  # one index, of a dataset that makes batches itself
                yield batch
                continue
            mine, share = cut_indices(batch, rank, world_size)
            begun.shares.append(share)
            yield mine

    def _drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Give the script's batches of indices, drawn from the shared random numbers."""
        while True:
            with self._streams.shared():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _next(self, original: Any, iterator: Any) -> Any:
        begun = self._passes.get(iterator)
        if begun is None:
            return original(iterator)
        if begun.purpose == "unknown" and begun.handed_out:
            self._settle(begun)
        if not begun.wrapped:
            begun.wrapped = True
            self._read_apart(iterator, begun)
        data = original(iterator)
        begun.handed_out += 1
        share = begun.shares.popleft() if begun.shares else None
        if share is not None:
            self._hand_out(share, begun)
        elif begun.slices and begun.purpose == "train":
            return self._slice(data, begun)
        else:
            self._batches.whole(training=begun.purpose != "evaluate")
        return data

    def _settle(self, begun: _Pass) -> None:
        """Tell from what was done with the first batch what the others are for."""
        if self._batches.trained:
            begun.purpose = "train"
            self._trainings.add(begun.where)
            return
        begun.purpose = "evaluate"
        self._evaluations.add(begun.where)
        self.ledger.touch("whole on every rank, nothing was trained", begun.where)

    def _read_apart(self, iterator: Any, begun: _Pass) -> None:
        """Have samples that this process reads draw from the rank's own random numbers."""
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if fetcher is None or begun.slices or begun.purpose == "evaluate":
            return
        fetch, streams = fetcher.fetch, self._streams

        def fetch_apart(index: Any) -> Any:
            if begun.slices or begun.purpose != "train":  # all ranks read the same
                return fetch(index)
            with streams.for_samples():
                return fetch(index)

        fetcher.fetch = fetch_apart

    def _slice(self, data: Any, begun: _Pass) -> Any:
        if self._batch == "per-rank":
            found = None
            why = "--batch per-rank can't divide the batches of such a dataset"
        else:
            found = cut_data(data, self._ranks.rank, self._ranks.world_size)
            why = "its batches are not made of tensors with one size of batch"
        if found is None:
            self._batches.whole(training=True)
            self.ledger.pass_over(f"DataLoader ({begun.where})", why)
            return data
        part, share = found
        self._hand_out(share, begun)
        return part

    def _hand_out(self, share: Share, begun: _Pass) -> None:
        self._batches.cut(share)
        self.ledger.apply("DataLoader", begun.where)
        self.ledger.counts["batches"] += 1
        self.ledger.counts["samples"] += share.count

    def _length(self, original: Any, loader: Any) -> int:
        """Give the batches of one rank; before a loader is read, one that shuffles is to train."""
        length: int = original(loader)
        shuffles = not isinstance(loader.sampler, SequentialSampler)
        trains = self._feeds.get(loader, shuffles)
        return -(-length // self._ranks.world_size) if trains else length
