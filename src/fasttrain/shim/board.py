"""A table of a few numbers that the ranks of one node share, in memory.

A collective costs a rank some hundred microseconds even for two numbers, because it wakes threads
beside those that compute. What a rank writes here the others read without waiting, as long as
something else, such as the averaging of gradients, has made sure that it is written.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fasttrain.shim import rank_variables

SPINS = 200  # looks at the table before a rank that waits begins to sleep
SLEEP_S = 5e-5
_WORD = 8  # bytes of a number; each slot begins with that of the sum that it belongs to


class Board:
    """Adds up rows of numbers over the ranks.

    Each rank has two slots and writes to them in turn: it can't write the third row before it has
    read the second of every other rank, and so none that another one still has to read.
    """

    def __init__(self, memory: Any, rank: int, world_size: int, width: int) -> None:
        self._memory = memory
        self._rank = rank
        self._heads = memoryview(memory).cast("Q")
        stride = 1 + width  # of a slot, in words
        # Where the slots of all ranks are, for even numbers of sums and for odd ones
        self._slots = [[(2 * r + odd) * stride for r in range(world_size)] for odd in (0, 1)]
        self._filled = [0, 0]  # numbers that each slot of this rank's holds
        self._number = 0
        self._fence = threading.Lock()

    @classmethod
    def of_node(cls, store: Any, rank: int, world_size: int, width: int) -> Board | None:
        """Make the table with the other ranks; every rank must call this alike.

        Args:
            store: Key-value store of all ranks.
            rank: Global rank of this worker.
            world_size: Number of ranks.
            width: Numbers of a row.

        Returns:
            None where the ranks are on several nodes, or the memory could not be had.
        """
        if not on_one_node(world_size):
            return None
        size = world_size * 2 * _WORD * (1 + width)
        if rank == 0:
            store.set("board", _new_file(size))
        path = store.get("board").decode()
        memory = _mapped(path, size) if path else None
        # Nothing of it is left behind, however the run ends: the name goes once all have it.
        if memory is None:
            store.set("board/all", "no")
        elif store.add("board/open", 1) == world_size:
            store.set("board/all", "yes")
        together = store.get("board/all") == b"yes"
        if rank == 0 and path:
            Path(path).unlink(missing_ok=True)
        return cls(memory, rank, world_size, width) if together and memory is not None else None

    def begin_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Write this rank's row, and give what waits for those of all ranks and adds them up.

        Args:
            values: The first numbers of the row; the rest is 0.
        """
        self._number = number = self._number + 1
        slot, size = number % 2, len(values)
        row, at = _row(size), self._slots[slot][self._rank]
        row.pack_into(self._memory, _WORD * (at + 1), *values)
        if size != self._filled[slot]:
            for left in range(size, self._filled[slot]):
                self._heads[at + 1 + left] = 0  # the same bits as 0.0
            self._filled[slot] = size
        for _ in range(2):  # no processor may show the number before the row
            with self._fence:
                pass
        self._heads[at] = number
        return functools.partial(self._sum, number, row)

    def _sum(self, number: int, row: struct.Struct) -> list[float]:
        slots, heads, looks = self._slots[number % 2], self._heads, 0
        for at in slots:
            while heads[at] != number:
                looks += 1
                time.sleep(SLEEP_S if looks > SPINS else 0)
        for _ in range(2):
            with self._fence:
                pass
        rows = [row.unpack_from(self._memory, _WORD * (at + 1)) for at in slots]
        return list(map(sum, zip(*rows, strict=True)))


def on_one_node(world_size: int) -> bool:
    """Whether all ranks are on this node."""
    return rank_variables.get("LOCAL_WORLD_SIZE") == str(world_size)


@functools.cache
def _row(size: int) -> struct.Struct:
    return struct.Struct(f"{size}d")


def _new_file(size: int) -> str:
    """Give the path of a file of zeros that only this user can open; empty where there is none."""
    for folder in ("/dev/shm", None):  # noqa: S108 - made by mkstemp, and gone in a moment
        try:
            descriptor, path = tempfile.mkstemp(prefix="fasttrain-", dir=folder)
        except OSError:
            continue
        try:
            os.write(descriptor, bytes(size))
        except OSError:  # full
            Path(path).unlink()
            continue
        finally:
            os.close(descriptor)
        return path
    return ""


def _mapped(path: str, size: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another view of the file system
        return None
    try:
        return mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
