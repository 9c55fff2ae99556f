"""Has worker processes read DataLoaders that have none: ``--loader-workers``.

The number of workers is lent to a DataLoader while it makes an iterator, so that the script doesn't
see it. The order of the samples, and what torch's samplers draw, are those of a DataLoader without
workers; what a dataset draws itself isn't, since each worker has its own random numbers.

Source: ``torch/utils/data/dataloader.py`` of torch 2.13, ``DataLoader._get_iterator``.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

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
            if why := _why_not(loader):
                self.recorder.pass_over(f"DataLoader ({where})", why)
                return original(loader)
            with _lent(loader, self._count):
                iterator = original(loader)
            self.recorder.apply("DataLoader", where)
            return iterator

        return _get_iterator


def build(decision: Decision[int], recorder: OutcomeRecorder) -> LoaderWorkers:
    """Build the lever."""
    return LoaderWorkers(recorder, decision.value)


def _why_not(loader: Any) -> str:
    """Return why a DataLoader has to be read as it is; empty if workers give the same batches."""
    if loader.num_workers:
        return f"it has {loader.num_workers} of the script's own"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset makes the batches, and each worker would make all of them"
    if not loader._auto_collation:
        return "its samples aren't collated, and the script may write into those of the dataset"
    multiprocessing = torch.multiprocessing
    if multiprocessing.current_process().daemon:
        return "this process may have no children"
    context = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() != "fork":
        return "processes aren't forked here, so that the dataset would have to be pickled"
    if any(isinstance(it, Tensor) and it.device.type != "cpu" for it in _values(loader.dataset)):
        return "its dataset is on a device, which a worker can't use"
    return ""


def _values(dataset: Any) -> Iterator[Any]:
    for value in getattr(dataset, "__dict__", {}).values():
        yield from value if isinstance(value, (tuple, list)) else (value,)


@contextmanager
def _lent(loader: Any, count: int) -> Iterator[None]:
    """Have a DataLoader seem to have workers in the block.

    The script's own function for workers isn't called without workers, and so it isn't here.
    """
    lent = {"num_workers": count, "prefetch_factor": PREFETCH, "worker_init_fn": open_files_again}
    own = vars(loader)
    before = {name: own[name] for name in lent}
    own.update(lent)
    try:
        yield
    finally:
        own.update(before)


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
