"""Has one rank per node read the data for all: the workers of a DataLoader start once.

Every rank runs the script on the whole batch, so that all need the same batches. The first rank of
a node starts the workers and sends their results to the node's other ranks, whose iterators are
torch's own without workers (see `fasttrain.shim.data_parallel.loading`).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.machinery import PathFinder
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import (
    IterDataPipe,
    MapDataPipe,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from fasttrain.model.outcome import State
from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.places import outside_of_torch
from fasttrain.shim.data_parallel.loading.iterators import (
    GivenResults,
    GivingContext,
    TakingContext,
)
from fasttrain.shim.data_parallel.loading.transport import Node, can_be_had, met
from fasttrain.shim.data_parallel.loading.transport import close as close_lines
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import module_name
from fasttrain.shim.hooks.device_clock import module_of
from fasttrain.shim.hooks.held import held_by
from fasttrain.shim.hooks.loop import LENT, on_batch
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.process.callsite import call_site

if TYPE_CHECKING:
    from collections.abc import Iterator


# Inspects datasets: shared memory in them, and batches that can be read by indexing alone.
#
# A dataset may hold a queue, a shared value or shared tensors through which its workers send the
# script other data than batches. Only the rank that starts the workers would get these data.


_MODULES = tuple(
    f"multiprocessing.{name}"
    for name in ("queues", "sharedctypes", "managers", "connection", "shared_memory", "pool")
)
_EVENTS = ("Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier")
_CTYPES = (ctypes.Array, ctypes._SimpleCData, ctypes.Structure)


def shared_memory_of(loader: Any) -> str:
    """Return the kind of the first object that a loader's workers share with the script, or ''."""
    searched = held_by(loader.dataset, loader.collate_fn, loader.worker_init_fn)
    return next(filter(None, (_shared(holder) for holder, _ in searched)), "")


def _shared(holder: Any) -> str:
    kind = type(holder)
    if issubclass(kind, Tensor):
        return "a shared tensor" if holder.is_cpu and holder.is_shared() else ""
    named = f"{module_name(kind).removeprefix('multiprocessing.')}.{kind.__qualname__}"
    if any(base.__module__ in _MODULES for base in kind.__mro__) or issubclass(kind, _CTYPES):
        return named
    if kind.__module__ == "multiprocessing.synchronize" and kind.__name__ in _EVENTS:
        return named
    writable = issubclass(kind, mmap.mmap) and not memoryview(holder).readonly
    return "mmap.mmap" if writable else ""


# torch's own methods, to detect that a script has replaced one.
_READ = TensorDataset.__getitem__, Subset.__getitem__, Subset.__getitems__


def fetches_by_index(loader: Any, fetch: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """Return a fetcher that indexes whole batches; None if its results could differ.

    Without workers each rank reads every batch. If reading is only indexing of tensors, a whole
    batch can be indexed at once instead of sample by sample, with equal bits.

    Source: ``torch/utils/data/dataset.py`` and ``_utils/collate.py`` of torch 2.13.

    Args:
        loader: A loader that reads in this process.
        fetch: Its own fetcher: returns a batch, by a list of indices.
    """
    taken = _taken(loader.dataset)
    known = (TensorDataset.__getitem__, Subset.__getitem__, Subset.__getitems__) == _READ
    if taken is None or not known or not loader._auto_collation:
        return None
    if loader.collate_fn is not default_collate:
        return None
    tensors, places = taken
    return functools.partial(_fetch, fetch, tensors, places)


def _taken(dataset: Any) -> tuple[Sequence[Tensor], list[Sequence[int]]] | None:
    """Return a dataset's tensors, and the indices of each `Subset` around it, outermost first."""
    places = []
    while type(dataset) is Subset:
        places.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    return dataset.tensors, places


def _is_plain(tensor: Tensor) -> bool:
    usual = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return usual and tensor.is_contiguous() and not tensor.requires_grad


def _fetch(
    fetch: Callable[[Any], Any],
    tensors: Sequence[Tensor],
    places: list[Sequence[int]],
    index: Any,
) -> Any:
    numbers = index
    for place in places:
        if set(map(type, numbers)) != {int}:  # bools and tensors index in another way
            return fetch(index)
        numbers = [place[number] for number in numbers]
    if set(map(type, numbers)) != {int} or not all(map(_is_plain, tensors)):
        return fetch(index)
    size = len(tensors[0])
    if min(numbers) < -size or max(numbers) >= size:
        return fetch(index)  # torch raises the IndexError that a script may catch
    # Numbers that aren't pinned are copied to a device only once it has done all before them.
    pinned = any(module_of(tensor.device) is not None for tensor in tensors)
    at = torch.tensor(numbers, device="cpu", pin_memory=pinned).remainder_(size)
    return [tensor.index_select(0, at.to(tensor.device, non_blocking=True)) for tensor in tensors]


BEGIN, READ_ON = "begin to read a DataLoader", "read on in a DataLoader"


# Where a loader keeps its context. Source: torch 2.13, DataLoader.multiprocessing_context
_CONTEXT = "_DataLoader__multiprocessing_context"


class SharedLoaders:
    """Shares the results of DataLoader iterators with workers.

    Args:
        recorder: This lever's recorder.
        ranks: All ranks.
        answers: Rank 0's answers, installed already.
    """

    def __init__(self, recorder: OutcomeRecorder, ranks: Ranks, answers: Answers) -> None:
        self.recorder = recorder
        self._ranks = ranks
        self._answers = answers
        self._number = 0
        self._has_met = False
        self._node: Node | None = None
        self._shared: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators
        self._indexed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given: list[
            tuple[weakref.ref[GivenResults], int]
        ] = []  # results, and the number of the loop's place
        self._why_not: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def install(self, undo: ExitStack) -> None:
        """Wrap the creation of iterators, and count their batches."""
        patching.wrap(_MultiProcessingDataLoaderIter, "__init__", self._sharing, undo)
        patching.wrap(_SingleProcessDataLoaderIter, "__init__", self._by_index, undo)
        on_batch(self._count, undo)
        self._answers.waiting_elsewhere.append(self._awaited)
        undo.callback(self._answers.waiting_elsewhere.remove, self._awaited)
        self.recorder.settle(State.ARMED, "no DataLoader with workers was read")
        self.recorder.excuse(State.SKIPPED, "the script reads without workers of a DataLoader")

    def _sharing(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any) -> None:  # noqa: N807
            if self._is_common(loader):
                self._make(original, iterator, loader)
            else:
                original(iterator, loader)

        return __init__

    def _by_index(self, original: Any) -> Any:
        """Speed up reading without workers, which every rank does by itself."""

        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any) -> None:  # noqa: N807
            original(iterator, loader)
            fetcher = iterator._dataset_fetcher
            if self.recorder.live and (fetch := fetches_by_index(loader, fetcher.fetch)):
                fetcher.fetch = fetch
                self._indexed.add(iterator)

        return __init__

    def refresh(self) -> None:
        """Do nothing: every batch is counted as it is yielded."""

    def _count(self, iterator: Any, _: Any) -> None:
        if iterator in self._shared:
            self.recorder.counts["shared batches"] += 1
        elif iterator in self._indexed:
            self.recorder.counts["batches by index"] += 1

    # --- which loaders are shared

    def _is_common(self, loader: Any) -> bool:
        """True if all ranks create this iterator, as far as can be known.

        Each rank finds out by itself whether workers can be lent to it, and has its own ones.
        """
        common = self.recorder.live and self._answers.answers() and get_worker_info() is None
        return common and _CONTEXT in vars(loader) and LENT not in vars(loader)

    def _reason(self, loader: Any) -> str:
        """Return why each rank has to read a loader itself; empty if it needn't."""
        if loader not in self._why_not:
            self._why_not[loader] = _why_not(loader)
        return self._why_not[loader]

    def _make(self, original: Any, iterator: Any, loader: Any) -> None:
        frame = outside_of_torch(sys._getframe(1))
        if frame is None:
            original(iterator, loader)
            return
        where = call_site()
        place = self._answers.places.number(frame, BEGIN)
        why_not = self._answers.ask(place, functools.partial(self._reason, loader))
        if not why_not and self._met() is None:
            why_not = "the ranks of a node can't share memory here"
        if why_not:
            self.recorder.pass_over(
                f"DataLoader ({where})", f"each rank reads it itself: {why_not}"
            )
            original(iterator, loader)
            return
        going_on = self._answers.places.number(frame, READ_ON)
        self._share(original, iterator, loader, going_on)
        self.recorder.apply("DataLoader", where)

    def _met(self) -> Node | None:
        if not self._has_met:
            self._has_met = True
            self._node = met(self._ranks)
        return self._node

    # --- sharing

    def _share(self, original: Any, iterator: Any, loader: Any, place: int) -> None:
        node = self._node
        assert node is not None
        self._number += 1
        with self._waits():
            sockets = node.begin(self._number)
        self._shared.add(iterator)
        if not node.is_first:
            taking = TakingContext(sockets[0], self._waits)
            weakref.finalize(iterator, taking.results.close)
            with _context(loader, taking):
                original(iterator, loader)
            return
        giving = GivingContext(loader.multiprocessing_context or torch.multiprocessing, sockets)
        try:
            with _context(loader, giving):
                original(iterator, loader)
        except BaseException:
            close_lines(*sockets)
            raise
        results = giving.results
        assert results is not None
        results.announce()
        self._given = [(ref, at) for ref, at in self._given if ref() is not None]
        self._given.append((weakref.ref(results), place))
        weakref.finalize(iterator, results.end)

    def _waits(self) -> Any:
        """Return a context that marks a wait for rank 0; no-op if the node's first rank isn't 0."""
        waits_for_rank_0 = self._node is not None and self._node.first == 0 != self._ranks.rank
        in_main = current_thread() is main_thread()
        return self._ranks.waits() if waits_for_rank_0 and in_main else nullcontext()

    def _awaited(self) -> tuple[int, int, int] | None:
        """Return a rank that waits for this one to read on, its place, and the results so far."""
        for ref, place in self._given:
            results = ref()
            waiting = results.awaits_more() if results is not None else None
            if results is not None and waiting is not None and self._node is not None:
                return self._node.first + 1 + waiting, place, results.given
        return None


@contextmanager
def _context(loader: Any, context: Any) -> Iterator[None]:
    """Replace a loader's multiprocessing context in the block."""
    before = vars(loader)[_CONTEXT]
    vars(loader)[_CONTEXT] = context
    try:
        yield
    finally:
        vars(loader)[_CONTEXT] = before


def _why_not(loader: Any) -> str:
    if not can_be_had():
        return "this system has no memory files"
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return "its dataset is a data pipe"
    if loader.timeout and loader.pin_memory and torch.accelerator.is_available():
        return "it has a timeout and pins memory"
    method = (loader.multiprocessing_context or torch.multiprocessing).get_start_method()
    if method == "forkserver" and PathFinder.find_spec("fasttrain", sys.path) is None:
        return "fasttrain isn't installed where a forkserver's processes search for it"
    shared = shared_memory_of(loader)
    return (
        f"its dataset holds {shared}, through which workers may send the script other data"
        if shared
        else ""
    )
