"""Has worker processes read DataLoaders that have none: ``--loader-workers``.

The script gets torch's iterator without workers. It asks the sampler for each batch when it would
without workers, and so draws the same numbers at the same time. What workers read ahead is chosen
by a copy of the sampler; a batch that isn't the one that the sampler then chooses is thrown away.

The script's process reads the first two batches of an epoch, and a worker the second one again: if
it isn't the same to the bit, or reading it has changed what the dataset holds, this process reads
on. So it does where anything fails in a worker, or on the way from one.

Source: ``torch/utils/data/dataloader.py`` of torch 2.13, ``DataLoader._get_iterator``,
``_SingleProcessDataLoaderIter``.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import resource
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from typing import Any

import torch
from torch import Generator
from torch.utils.data import BatchSampler, DataLoader, get_worker_info
from torch.utils.data._utils import pin_memory, signal_handling
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from fasttrain.model.decision import Decision
from fasttrain.model.outcome import State
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.loop import LENT
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.loader_workers.batches import Content, Unread, unpacked
from fasttrain.shim.levers.loader_workers.fitness import CHANGES, Holdings, why_here, why_not
from fasttrain.shim.levers.loader_workers.worker import Rows, same
from fasttrain.shim.process.callsite import call_site

NAME = "loader_workers"
PREFETCH = 2  # batches that each worker reads ahead, as by default
# A worker that a fork has left without threads that it needs may wait for ever: no batch takes
# longer than the longer of this and so many times what one has taken in this process.
LONGEST_S, SLOWEST = 20.0, 20.0


class LoaderWorkers:
    """Lends worker processes to DataLoaders.

    Args:
        recorder: This lever's recorder.
        count: Workers of each DataLoader.
    """

    def __init__(self, recorder: OutcomeRecorder, count: int) -> None:
        self.recorder = recorder
        self._count = count
        self._failed: dict[int, str] = {}  # why workers couldn't read a dataset, by its identity

    def install(self, undo: ExitStack) -> None:
        """Watch DataLoaders that begin to read."""
        patching.wrap(DataLoader, "_get_iterator", self._lending, undo)
        self.recorder.settle(State.ARMED)
        self.recorder.excuse(State.SKIPPED, "no DataLoader was read beyond its second batch")

    def refresh(self) -> None:
        """Do nothing: the recorder is up to date at any time."""

    def _lending(self, original: Any) -> Any:
        @functools.wraps(original)
        def _get_iterator(loader: Any) -> Any:
            if not self.recorder.live or get_worker_info() is not None:
                return original(loader)
            where = call_site()
            what = f"DataLoader ({where})"
            if why := self._failed.get(id(loader.dataset)) or why_not(loader):
                self.recorder.pass_over(what, why)
                return original(loader)

            def left(why: str, *, failed: bool) -> None:
                self.recorder.pass_over(what, why)
                if failed:
                    self._note_failed(loader.dataset, why)

            applied = functools.partial(self.recorder.apply, "DataLoader", where)
            return LentIterator(loader, self._count, applied, left)

        return _get_iterator

    def _note_failed(self, dataset: Any, why: str) -> None:
        """Note why workers couldn't read a dataset, as long as it is there."""
        identity = id(dataset)
        with suppress(TypeError):  # such as a list: it can't be known when it goes
            weakref.finalize(dataset, self._failed.pop, identity, None).atexit = False
        self._failed[identity] = f"in another epoch, {why}"


def build(decision: Decision[int], recorder: OutcomeRecorder) -> LoaderWorkers:
    """Build the lever."""
    return LoaderWorkers(recorder, decision.value)


_OF_PARENTS: list[Any] = []  # readers in a forked child, where they must not end the workers


class LentIterator(_SingleProcessDataLoaderIter):
    """torch's iterator without workers, whose batches workers read while they read the same.

    Args:
        loader: The DataLoader, which has no workers.
        count: The workers, which start with the third batch.
        applied: Called with the first batch that a worker has read.
        left: Called with the reason if this process reads on by itself, and whether workers failed.
    """

    def __init__(
        self, loader: Any, count: int, applied: Callable[[], None], left: Callable[..., None]
    ) -> None:
        super().__init__(loader)
        self._loader, self._count, self._applied, self._left = loader, count, applied, left
        self._pid = os.getpid()
        self._reader: Any = None
        self._ahead: deque[Any] = deque()  # the choices of batches that workers have been sent
        self._held: list[Any] = []  # the choice of a batch that is read here after all
        self._chosen: Any = None  # the last choice
        # What reads the next batch, and with what: bound to this object it would keep it alive, and
        # with it the workers of an epoch that the script has broken off.
        self._next: tuple[Any, ...] = (LentIterator._first,)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end multiprocessing has ended them, and modules are emptied.
        if not ends():
            self._end()

    def _next_index(self) -> Any:
        if self._held:
            return self._held.pop()
        self._chosen = super()._next_index()  # type: ignore[no-untyped-call]
        return self._chosen

    def _next_data(self) -> Any:
        try:
            act, *args = self._next
            return act(self, *args)
        except BaseException:  # the end, or a signal's: which batch is next can't be known
            self._end()
            raise

    def _here(self) -> Any:
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _first(self) -> Any:
        choices = _Choices(self._index_sampler)
        data = self._here()
        choices.past.append(self._chosen)
        self._next = LentIterator._second, choices
        return data

    def _second(self, choices: _Choices) -> Any:
        """Read a batch here that a worker will read again."""
        try:
            why, holdings = why_here(self._loader), Holdings(self._loader)
        except Exception as error:  # noqa: BLE001 - objects of any kind
            why = f"what its dataset holds can't be looked at: {Unread.of(error).why}"
        if why:
            self._stop(why, failed=False)
            return self._here()
        began_s = time.perf_counter()
        data = self._here()
        longest_s = max(LONGEST_S, SLOWEST * (time.perf_counter() - began_s))
        choices.past.append(self._chosen)
        try:
            content = Content(data)
        except Exception as error:  # noqa: BLE001 - objects of any kind
            self._stop(f"its batches can't be sent: {Unread.of(error).why}", failed=True)
            return data
        if holdings.have_changed():
            self._stop(CHANGES, failed=False)
            return data
        rows = Rows(self._dataset_fetcher, self._chosen, content)
        self._next = LentIterator._third, choices, rows, longest_s
        return data

    def _third(self, choices: _Choices, rows: Rows, longest_s: float) -> Any:
        index = self._next_index()
        self._next = (LentIterator._by_workers,)
        self._reader = self._tried(lambda: self._begun(choices, rows, longest_s))
        self._loader = None
        return self._batch(index)

    def _by_workers(self) -> Any:
        return self._batch(self._next_index())

    def _batch(self, index: Any) -> Any:
        """Return the batch of a choice, read by a worker if that can be."""
        if self._reader is not None and self._is_next(index):
            batch = self._tried(self._reader._next_data)
            if isinstance(batch, bytes):
                batch = self._tried(lambda: self._loaded(batch), whatever=True)
            if isinstance(batch, tuple):
                self._applied()
                return batch[0]
            if isinstance(batch, Unread):
                self._read_on_here(f"a worker couldn't: {batch.why}")
        self._held.append(index)
        return self._here()

    def _is_next(self, index: Any) -> bool:
        if os.getpid() != self._pid:
            self._read_on_here("it is read in a forked process, too")
        elif self._ahead and _is_same(self._ahead.popleft(), index):
            return True
        else:
            self._read_on_here(
                "its sampler, or the generator of that, was used or changed within an epoch"
            )
        return False

    def _loaded(self, batch: bytes) -> tuple[Any]:
        data = unpacked(batch)
        if not _have_room():
            data = copy.deepcopy(data)
        if self._pin_memory:
            pin: Any = pin_memory.pin_memory
            data = pin(data, self._pin_memory_device)
        return (data,)

    def _tried(self, act: Callable[[], Any], *, whatever: bool = False) -> Any:
        """Return what ``act`` does; None if it fails by something that is of workers alone."""
        try:
            return act()
        except Exception as error:
            if not whatever and not _is_of_workers(error):
                raise
            self._read_on_here(Unread.of(error).why)
            return None

    def _read_on_here(self, why: str) -> None:
        self._stop(f"from here on the script's process reads it itself: {why}", failed=True)

    def _stop(self, why: str, *, failed: bool) -> None:
        self._end()
        self._left(why, failed=failed)

    def _end(self) -> None:
        """End the workers at once, whatever they read."""
        self._next = (LentIterator._here,)
        reader, self._reader = self._reader, None
        if reader is None:
            return
        if os.getpid() != self._pid:
            _OF_PARENTS.append(reader)
            return
        for worker in reader._workers:
            worker.terminate()
        # A worker that ended while it asked for this event keeps the lock of it for ever.
        reader._workers_done_event = threading.Event()
        reader._shutdown_workers()

    def _begun(self, choices: _Choices, rows: Rows, longest_s: float) -> Any:
        """Start the workers, before the third batch is read."""
        ahead = choices.left()
        lent = {
            "num_workers": self._count,
            "prefetch_factor": PREFETCH,
            "timeout": longest_s,
            "worker_init_fn": rows.begin,
            "generator": Generator().manual_seed(int(self._base_seed)),
            "batch_sampler": _noted(ahead, self._ahead),
            "dataset": rows,
            "collate_fn": same,
            "pin_memory": False,  # bytes
            "in_order": True,  # whatever the script has set, as without workers
            # torch's own would set the process's default, which a script may set once
            "_DataLoader__multiprocessing_context": multiprocessing.get_context("fork"),
            LENT: True,
        }
        with _lent(self._loader, lent):
            reader = _MultiProcessingDataLoaderIter(self._loader)
        # A worker's death is found where its batch is waited for, and not anywhere in the script.
        watched: Any = signal_handling
        watched._remove_worker_pids(id(reader))
        reader._worker_pids_set = False
        return reader


def _is_of_workers(error: Exception) -> bool:
    """True if torch or Python's library has raised an error, and no signal handler of the script's.

    Nothing of the script's is called where its process waits for workers, but such handlers.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    package = name.partition(".")[0]
    return package in {"torch", "fasttrain"} or package in sys.stdlib_module_names


class _Choices:
    """What a sampler will choose, which is asked for in a copy of it.

    Args:
        batches: The sampler of batches, before it has chosen any.

    Attributes:
        past: What it has chosen meanwhile.
    """

    def __init__(self, batches: Any) -> None:
        self.past: list[Any] = []
        self._state = torch.default_generator.get_state()
        self._copied = inner = copy.copy(batches)
        if type(batches) is BatchSampler:
            self._copied.sampler = inner = copy.copy(batches.sampler)
        if isinstance(own := getattr(inner, "generator", None), Generator):
            inner.generator = Generator(own.device)
            inner.generator.set_state(own.get_state())

    def left(self) -> Iterator[Any]:
        """Return what it will choose next; nothing if it hasn't chosen what its copy has."""
        choices = iter(self._copied)
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._state)
        try:
            first = list(islice(choices, 1))  # torch's samplers draw from the global generator now
            ahead = chain(first, choices)
            if all(_is_same(next(ahead), known) for known in self.past):
                return ahead
        except Exception:  # noqa: BLE001, S110 - it comes again, where the script expects it
            pass
        finally:
            torch.default_generator.set_state(state)
        return iter(())


def _is_same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def _noted(choices: Iterator[Any], ahead: deque[Any]) -> Iterator[Any]:
    with suppress(Exception):  # as above
        for index in choices:
            ahead.append(index)
            yield index


@contextmanager
def _lent(loader: Any, lent: dict[str, Any]) -> Iterator[None]:
    """Change attributes of a DataLoader in the block."""
    own = vars(loader)
    before = {name: own[name] for name in lent if name in own}
    own.update(lent)
    try:
        yield
    finally:
        for name in lent:
            del own[name]
        own.update(before)


def _have_room() -> bool:
    """True if less than half of the file descriptors that this process may have are open.

    A batch that a worker has sent has one for each tensor, as long as the script keeps it.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return False
    os.close(lowest)
    return most < 0 or lowest < most // 2
