"""Has worker processes read DataLoaders that have none: ``--loader-workers``.

The script gets torch's iterator without workers. It asks the sampler for each batch when it would
without workers, and so draws the same numbers at the same time. What workers read ahead is chosen
by a copy of the sampler; a batch that isn't the one that the sampler then chooses is thrown away.

Source: ``torch/utils/data/dataloader.py`` of torch 2.13, ``DataLoader._get_iterator``,
``_SingleProcessDataLoaderIter``.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import random
import resource
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from fasttrain.model.decision import Decision
from fasttrain.model.outcome import State
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.process.callsite import call_site

NAME = "loader_workers"
PREFETCH = 2  # batches that each worker reads ahead, as by default


class LoaderWorkers:
    """Lends worker processes to DataLoaders.

    Args:
        recorder: This lever's recorder.
        count: Workers of each DataLoader.
    """

    def __init__(self, recorder: OutcomeRecorder, count: int) -> None:
        self.recorder = recorder
        self._count = count

    def install(self, undo: ExitStack) -> None:
        """Watch DataLoaders that begin to read."""
        patching.wrap(DataLoader, "_get_iterator", self._lending, undo)
        self.recorder.settle(State.ARMED)
        self.recorder.excuse(State.SKIPPED, "no DataLoader was read")

    def refresh(self) -> None:
        """Do nothing: the recorder is up to date at any time."""

    def _lending(self, original: Any) -> Any:
        @functools.wraps(original)
        def _get_iterator(loader: Any) -> Any:
            if not self.recorder.live or get_worker_info() is not None:
                return original(loader)
            where = call_site()
            what = f"DataLoader ({where})"
            if why := _why_not(loader):
                self.recorder.pass_over(what, why)
                return original(loader)
            left = functools.partial(self.recorder.pass_over, what)
            iterator = LentIterator(loader, self._count, left)
            self.recorder.apply("DataLoader", where)
            return iterator

        return _get_iterator


def build(decision: Decision[int], recorder: OutcomeRecorder) -> LoaderWorkers:
    """Build the lever."""
    return LoaderWorkers(recorder, decision.value)


# --- which DataLoaders


def _why_not(loader: Any) -> str:
    """Return why a DataLoader has to be read as it is; empty if workers give the same batches."""
    if loader.num_workers:
        return f"it has {loader.num_workers} of the script's own"
    if any(name not in vars(loader) for name in _LENT):
        return "its class computes its settings"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset makes the batches, and each worker would make all of them"
    if not loader._auto_collation:
        return "its samples aren't collated, and the script may write into those of the dataset"
    if loader.timeout or isinstance(loader.dataset, MapDataPipe):
        return "torch treats it in another way with workers"
    multiprocessing = torch.multiprocessing
    if multiprocessing.current_process().daemon:
        return "this process may have no children"
    if multiprocessing.get_start_method() != "fork":
        return "processes aren't forked here, so that the dataset would have to be pickled"
    if not _can_be_copied(loader.batch_sampler):
        return "its sampler isn't one of torch's, and may choose a batch by what came before it"
    return next(filter(None, map(_tie, _held_by(loader.dataset, loader.collate_fn))), "")


_SAMPLERS = (
    *(RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler),
    *(DistributedSampler, list, tuple, range),
)


def _can_be_copied(batches: Any) -> bool:
    """True if a copy of a sampler chooses the same batches, and leaves no trace."""
    inner = batches.sampler if type(batches) is BatchSampler else batches
    return type(inner) in _SAMPLERS


MOST = 2_000  # objects of a dataset that are looked at
MANY = 50  # of each container
_ATOMS = (str, bytes, int, float, type, ModuleType)


def _held_by(*holders: Any) -> Iterator[Any]:
    """Yield what a dataset consists of, itself included."""
    pending, seen = deque(holders), set(map(id, holders))
    while pending and len(seen) < MOST:
        holder = pending.popleft()
        yield holder
        for part in _parts(holder):
            if id(part) not in seen and not isinstance(part, _ATOMS):
                seen.add(id(part))
                pending.append(part)


def _parts(holder: Any) -> Iterator[Any]:
    if isinstance(holder, dict):
        yield from islice(dict.values(holder), MANY)
    elif isinstance(holder, (list, tuple, set, frozenset, deque)):
        yield from islice(holder, MANY)
    elif isinstance(holder, MethodType):
        yield holder.__self__
    elif isinstance(holder, functools.partial):
        yield from (holder.func, holder.args, holder.keywords)
    elif isinstance(holder, FunctionType):
        for cell in holder.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield cell.cell_contents
    elif not isinstance(holder, Tensor):
        with suppress(AttributeError):
            yield from islice(object.__getattribute__(holder, "__dict__").values(), MANY)


_NOT_SHARED = {  # classes, or the modules of all of them, of which a fork has no use
    *("threading.Thread", "subprocess.Popen", "socket.socket", "sqlite3.Connection"),
    *("concurrent.futures", "queue", "multiprocessing.queues"),
    *("multiprocessing.connection", "multiprocessing.pool", "multiprocessing.managers"),
}


def _tie(held: Any) -> str:
    """Return why something that a dataset holds keeps it in this process; empty if it doesn't."""
    if isinstance(held, Tensor):
        away = held.device.type != "cpu"
        return "its dataset is on a device, which a worker can't use" if away else ""
    kinds = type(held).__mro__
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    draws = isinstance(held, (Generator, random.Random)) or "numpy.random" in names[0]
    if draws:
        return "its dataset draws by a generator of its own, which workers would each copy"
    if isinstance(held, GeneratorType):
        return "its dataset holds a generator, which workers would each copy"
    for kind, name in zip(kinds, names, strict=True):
        module = kind.__module__.removeprefix("_")  # some are written in C
        packages = {module, module.rpartition(".")[0], name}
        if packages & _NOT_SHARED:
            return f"its dataset holds a {name}, which a forked process can't share"
    return ""


# --- how workers read


_LENT = {
    *("num_workers", "prefetch_factor", "worker_init_fn", "generator", "batch_sampler"),
    *("dataset", "collate_fn", "pin_memory"),
}


class LentIterator(_SingleProcessDataLoaderIter):
    """torch's iterator without workers, whose batches workers read while they read the same.

    Args:
        loader: The DataLoader, which has no workers.
        count: The workers, which start with the first batch.
        left: Called with the reason if workers read on no longer.
    """

    def __init__(self, loader: Any, count: int, left: Callable[[str], None]) -> None:
        super().__init__(loader)
        self._loader, self._count, self._left = loader, count, left
        self._reader: Any = None
        self._ahead: deque[Any] = deque()  # the choices of batches that workers have been sent
        self._held: list[Any] = []  # the choice of a batch that is read here after all

    def _next_index(self) -> Any:
        return self._held.pop() if self._held else super()._next_index()  # type: ignore[no-untyped-call]

    def _next_data(self) -> Any:
        loader, self._loader = self._loader, None
        if loader is not None:
            self._reader = self._begun(loader)
        try:
            index = self._next_index()
            if self._reader is None or not self._is_next(index):
                return self._read_here(index)
            batch = self._reader._next_data()
        except BaseException:  # the end, or a signal's: which batch is next can't be known
            self._reader = None
            raise
        if isinstance(batch, Unread):
            data = self._read_here(index)
            self._stop(f"a worker couldn't: {batch.why}")
            return data
        return batch if _have_room() else copy.deepcopy(batch)

    def _read_here(self, index: Any) -> Any:
        self._held.append(index)
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _stop(self, why: str) -> None:
        self._reader = None
        self._left(f"from here on the script's process reads it itself: {why}")

    def _is_next(self, index: Any) -> bool:
        if self._ahead:
            ahead = self._ahead.popleft()
            if ahead is index or ahead == index:
                return True
        self._stop("its sampler, or the generator of that, was used or changed within an epoch")
        return False

    def _begun(self, loader: Any) -> Any:
        """Start the workers, before the sampler chooses the first batch."""
        ahead = _choices(loader.batch_sampler)
        lent = {
            "num_workers": self._count,
            "prefetch_factor": PREFETCH,
            "worker_init_fn": open_files_again,
            "generator": Generator().manual_seed(int(self._base_seed)),
            "batch_sampler": _noted(ahead, self._ahead),
            "dataset": Rows(self._dataset_fetcher.fetch),
            "collate_fn": _same,
            "pin_memory": self._pin_memory,  # without a second warning
            "in_order": True,  # whatever the script has set, as without workers
        }
        with _lent(loader, lent):
            return _MultiProcessingDataLoaderIter(loader)


def _choices(batches: Any) -> Iterator[Any]:
    """Return what a sampler will choose, which draws nothing from the generators by that."""
    copied = copy.copy(batches)
    inner = copied
    if type(batches) is BatchSampler:
        copied.sampler = inner = copy.copy(batches.sampler)
    if isinstance(own := getattr(inner, "generator", None), Generator):
        inner.generator = Generator(own.device)
        inner.generator.set_state(own.get_state())
    state = torch.get_rng_state()
    choices = iter(copied)
    try:
        first = list(islice(choices, 1))  # torch's samplers draw from the global generator by this
    except Exception:  # noqa: BLE001 - it comes again, where the script expects it
        return iter(())
    finally:
        torch.set_rng_state(state)
    return chain(first, choices)


def _noted(choices: Iterator[Any], ahead: deque[Any]) -> Iterator[Any]:
    with suppress(Exception):  # as above
        for index in choices:
            ahead.append(index)
            yield index


def _same(batch: Any) -> Any:
    return batch


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


# --- in a worker


@dataclass(slots=True)
class Unread:
    """Sent in the place of a batch that a worker couldn't read or send."""

    why: str


class Rows:
    """Reads whole batches as the script's process does; in the place of the dataset."""

    def __init__(self, fetch: Callable[[Any], Any]) -> None:
        self._fetch = fetch

    def __getitems__(self, index: Any) -> Any:
        """Return a batch, or why there is none: the script's process raises what it raises."""
        before = _global_states()
        try:
            batch = self._fetch(index)
            if _global_states() != before:
                return Unread("the dataset draws from a global random generator")
            _Trial(io.BytesIO(), 5, buffer_callback=lambda _: None).dump(batch)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit, too
            return Unread(f"{type(error).__name__}: {error}"[:LONGEST])
        return batch


def _global_states() -> tuple[Any, ...]:
    """Return the states of the generators that all of a process draws from."""
    numpy: Any = sys.modules.get("numpy.random")
    of_numpy = pickle.dumps(numpy.get_state(legacy=False)) if numpy is not None else b""
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy


LONGEST = 200  # characters of an error


class _Trial(pickle.Pickler):
    """Raises if a batch can't be sent: torch's queue would only print it, and wait for ever."""

    def reducer_override(self, value: Any) -> Any:
        """Leave tensors out, which are sent by shared memory."""
        if not isinstance(value, Tensor):
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise TypeError("its autograd graph can't be sent")
        if value.is_quantized or value.is_nested:  # torch 2.13 makes broken tensors of them
            raise TypeError("a quantized or nested tensor can't be sent")
        return bool, ()


def open_files_again(_worker: int) -> None:
    """Open the regular files that this process reads once more, at the same place.

    After a fork several processes share the place of each open file: datasets that seek and read
    would get each other's bytes.
    """
    with suppress(OSError):  # no /proc
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # it was that of the listing, or the file may not be opened
                _open_again(int(path.name))


def _open_again(descriptor: int) -> None:
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    is_read = flags & os.O_ACCMODE != os.O_WRONLY
    if not is_read or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    place = os.lseek(descriptor, 0, os.SEEK_CUR)
    inherited = os.get_inheritable(descriptor)
    opened = os.open(f"/proc/self/fd/{descriptor}", flags & ~(os.O_CREAT | os.O_TRUNC | os.O_EXCL))
    try:
        os.lseek(opened, place, os.SEEK_SET)
        os.dup2(opened, descriptor, inheritable=inherited)
    finally:
        os.close(opened)
