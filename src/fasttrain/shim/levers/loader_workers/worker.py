"""What runs in a worker that is lent to a DataLoader."""

from __future__ import annotations

import os
import pickle
import random
import signal
import stat
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from fasttrain.shim.hooks import patching
from fasttrain.shim.levers.loader_workers.batches import Content, Unread, packed
from fasttrain.shim.levers.loader_workers.fitness import CHANGES, Holdings

DRAWS = "the dataset draws from a global random generator"
PARTS = "its batches are parts of what its dataset holds, and the script may change them"
SLOW = "finding out whether reading changes the dataset takes longer than reading"
DIFFERS = "it reads other rows than this process: they depend on what was read before, or on chance"
JUDGED = 5  # batches of a worker, after which its times are
NOTHING_S = 1e-3  # such a time doesn't matter
# Timers aren't inherited; torch has set its own handler of SIGTERM, which ends a worker.
_KEPT = {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGTERM}


class Rows:
    """Reads whole batches as the script's process does; in the place of the dataset.

    Args:
        fetcher: torch's, which returns a batch by what the sampler has chosen.
        index: A choice whose batch the script's process has read.
        content: What that was.
    """

    def __init__(self, fetcher: Any, index: Any, content: Content) -> None:
        self._fetcher = fetcher
        self._known = index, content
        self._is_unchecked = False
        self._times: list[tuple[float, float]] = []  # of reading, and of comparing

    def begin(self, worker: int) -> None:
        """Make a worker as like the script's process as can be; torch calls it at the start."""
        _open_files_again()
        _leave_signals()
        # Datasets may ask for it, and torch's collate function stacks in another way in a worker.
        patching.put(torch_worker, "_worker_info", None, ExitStack())
        self._is_unchecked = worker == 0  # whose first batch comes before those of others
        self._holdings = Holdings(self._fetcher)

    def __getitems__(self, index: Any) -> Any:
        """Return a batch in bytes, or why there is none: the script's process reads it then."""
        try:
            if self._is_unchecked:
                self._is_unchecked = False
                self._check()
            return packed(self._read(index))
        except _OtherwiseError as error:
            return Unread(str(error))
        except BaseException as error:  # noqa: BLE001 - SystemExit, too
            return Unread.of(error)

    def _read(self, index: Any) -> Any:
        before = _global_states()
        began_s = time.perf_counter()
        batch = self._fetcher.fetch(index)
        ended_s = time.perf_counter()
        if _global_states() != before:
            raise _OtherwiseError(DRAWS)
        if self._holdings.have_changed():
            raise _OtherwiseError(CHANGES)
        self._times.append((ended_s - began_s, time.perf_counter() - ended_s))
        if len(self._times) == JUDGED:
            reading_s, comparing_s = map(min, zip(*self._times, strict=True))
            if comparing_s > max(reading_s, NOTHING_S):
                raise _OtherwiseError(SLOW)
        return batch

    def _check(self) -> None:
        index, content = self._known
        found = Content(self._read(index))
        if found.shares_with(content):
            raise _OtherwiseError(PARTS)
        if found.differs(content):
            raise _OtherwiseError(DIFFERS)
        found.read_again()


class _OtherwiseError(Exception):
    """What a worker reads isn't what the script's process would read."""


def same(batch: Any) -> Any:
    """Collate nothing: `Rows` returns whole batches."""
    return batch


def _global_states() -> tuple[Any, ...]:
    """Return the states of the generators that all of a process draws from."""
    numpy: Any = sys.modules.get("numpy.random")
    of_numpy = pickle.dumps(numpy.get_state(legacy=False)) if numpy is not None else b""
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy


def _leave_signals() -> None:
    """Leave signals that the script handles to the script's process, which they reach as well."""
    for number in signal.valid_signals() - _KEPT:
        if callable(signal.getsignal(number)) and isinstance(number, signal.Signals):
            ignored = signal.SIG_DFL if number is signal.SIGCHLD else signal.SIG_IGN
            signal.signal(number, ignored)


def _open_files_again() -> None:
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
