"""A table of a few numbers that the ranks of one node share, in memory.

A collective costs a rank some hundred microseconds even for two numbers, because it wakes threads
beside those that compute. What a rank writes here the others read without waiting, as long as
something else, such as the averaging of gradients, has made sure that it is written.
"""

from __future__ import annotations

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
_HEAD = struct.Struct("Q")  # number of the sum that a slot belongs to


class Board:
    """Adds up rows of numbers over the ranks.

    Each rank has two slots and writes to them in turn: it can't write the third row before it has
    read the second of every other rank, and so none that another one still has to read.
    """

    def __init__(self, memory: Any, rank: int, world_size: int, width: int) -> None:
        self._memory = memory
        self._rank, self._world_size = rank, world_size
        self._width = width
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
        if rank_variables.get("LOCAL_WORLD_SIZE") != str(world_size):
            return None
        size = world_size * 2 * (_HEAD.size + 8 * width)
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
        self._number += 1
        number, row = self._number, struct.Struct(f"{len(values)}d")
        at = self._slot(self._rank, number)
        body = at + _HEAD.size
        row.pack_into(self._memory, body, *values)
        self._memory[body + row.size : body + 8 * self._width] = bytes(8 * self._width - row.size)
        for _ in range(2):  # no processor may show the number before the row
            with self._fence:
                pass
        _HEAD.pack_into(self._memory, at, number)

        def wait() -> list[float]:
            rows = [self._read(rank, number, row) for rank in range(self._world_size)]
            return [sum(column) for column in zip(*rows, strict=True)]

        return wait

    def _slot(self, rank: int, number: int) -> int:
        return (2 * rank + number % 2) * (_HEAD.size + 8 * self._width)

    def _read(self, rank: int, number: int, row: struct.Struct) -> tuple[float, ...]:
        at, looks = self._slot(rank, number), 0
        while _HEAD.unpack_from(self._memory, at)[0] != number:
            looks += 1
            time.sleep(SLEEP_S if looks > SPINS else 0)
        for _ in range(2):
            with self._fence:
                pass
        return row.unpack_from(self._memory, at + _HEAD.size)


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
