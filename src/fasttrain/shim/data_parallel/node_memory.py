"""Memory that the ranks of one node share, and a table in it by which they exchange numbers."""

from __future__ import annotations

import functools
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.process import entry


def on_one_node(world_size: int) -> bool:
    """True if all ranks are on this node."""
    return entry.get("LOCAL_WORLD_SIZE") == str(world_size)


def shared_memory(store: Any, name: str, rank: int, world_size: int, size: int) -> mmap.mmap | None:
    """Return zeroed memory that all ranks share; every rank must call this.

    Args:
        store: Key-value store of all ranks.
        name: The memory's name in the store.
        rank: Global rank of this worker.
        world_size: Number of ranks.
        size: Bytes.

    Returns:
        None if the ranks are on several nodes, or a rank couldn't map the memory.
    """
    if not on_one_node(world_size):
        return None
    # Created once all ranks are here, so that the file name exists briefly: a run may be killed.
    if store.add(f"{name}/here", 1) == world_size:
        store.set(f"{name}/met", "")
    if rank == 0:
        store.get(f"{name}/met")
        store.set(name, _new_file(size))
    path = store.get(name).decode()
    memory = _mapped(path, size) if path else None
    # Unlinked as soon as all have mapped it, so that no file remains however the run ends.
    if memory is None:
        store.set(f"{name}/all", "no")
    elif store.add(f"{name}/open", 1) == world_size:
        store.set(f"{name}/all", "yes")
    together = store.get(f"{name}/all") == b"yes"
    if rank == 0 and path:
        Path(path).unlink(missing_ok=True)
    return memory if together else None


def _new_file(size: int) -> str:
    """Return the path of a zeroed file that only this user can open; empty if it fails."""
    for folder in ("/dev/shm", None):  # noqa: S108 - by mkstemp, and unlinked soon
        try:
            descriptor, path = tempfile.mkstemp(prefix="fasttrain-", dir=folder)
        except OSError:
            continue
        try:
            _fill(descriptor, size)
        except OSError:  # full
            Path(path).unlink()
            continue
        finally:
            os.close(descriptor)
        return path
    return ""


def _fill(descriptor: int, size: int) -> None:
    """Write zeros: a sparse file would allocate later, and SIGBUS the process if memory is full."""
    left = size
    while left:
        left -= os.write(descriptor, bytes(min(left, 1 << 20)))


def _mapped(path: str, size: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # this rank's container doesn't have the file
        return None
    try:
        return mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


YIELDS = 100  # looks of a waiting rank, a microsecond each, before it sleeps for the shortest time
SPINS = 200  # looks before it sleeps for longer
SLEEP_S = 5e-5
WORD = 8  # bytes per number; a slot's first number says which sum it belongs to


def rest(looks: int) -> None:
    """Let others compute until a waiting rank looks again.

    A sleep of no time takes 50 to 100 microseconds, as long as most waits of ranks that are equally
    fast: at first only the processor is offered to others.

    Args:
        looks: How often it has looked.
    """
    if looks <= YIELDS:
        _offer()
    else:
        time.sleep(SLEEP_S if looks > SPINS else 0)


_offer: Callable[[], object] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


class Board:
    """Sums numbers and tensors over the ranks of a node, averages tensors, and gathers them.

    A gloo collective costs a rank some hundred microseconds even for two numbers, because it wakes
    threads in addition to those that compute. Here each rank writes into its own slot, and reads
    the others' slots when all have written.

    Each rank has two slots and writes them in turn. It writes a third row only after it has read
    the second row of every other rank, who have then all read its first.

    Attributes:
        width: Numbers per row.
    """

    def __init__(self, memory: Any, rank: int, world_size: int, width: int) -> None:
        self.width = width
        self._memory = memory
        self._rank = rank
        self._heads = memoryview(memory).cast("Q")
        # The script's first call may be under `inference_mode`, whose tensors can't be written to
        # outside of it.
        with torch.inference_mode(mode=False):
            self._words = torch.frombuffer(memory, dtype=torch.float64)
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        stride = 1 + width  # words per slot
        # Offsets of all ranks' slots in words, for even sums and for odd ones.
        self._slots = [[(2 * r + odd) * stride for r in range(world_size)] for odd in (0, 1)]
        self._number = 0
        self._fence = threading.Lock()

    @classmethod
    def of_node(
        cls, store: Any, rank: int, world_size: int, width: int, name: str = "board"
    ) -> Board | None:
        """Return the table shared with the other ranks; every rank must call this.

        Args:
            store: Key-value store of all ranks.
            rank: Global rank of this worker.
            world_size: Number of ranks.
            width: Numbers per row.
            name: Its name in the store.

        Returns:
            None if the ranks are on several nodes, or a rank couldn't map the memory.
        """
        size = world_size * 2 * WORD * (1 + width)
        memory = shared_memory(store, name, rank, world_size, size)
        return cls(memory, rank, world_size, width) if memory is not None else None

    def sum_numbers(self, values: Sequence[float], part: Tensor | None = None) -> list[float]:
        """Return the sums over all ranks.

        Args:
            values: The same number of them on all ranks.
            part: A tensor for `parts_of_last_sum`, as for `all_gather`.
        """
        _, at = self._begin()
        row = _row(len(values))
        row.pack_into(self._memory, WORD * (at + 1), *values)
        if part is not None:
            begin = WORD * (at + 1) + row.size
            self._bytes[begin : begin + part.nbytes].copy_(part.view(-1).view(torch.uint8))
        self._show(at)
        self._wait(self._number)
        slots = self._slots[self._number % 2]
        rows = [row.unpack_from(self._memory, WORD * (at + 1)) for at in slots]
        return list(map(sum, zip(*rows, strict=True)))

    def holds(self, values: int, part: Tensor) -> bool:
        """True if a row has room for so many numbers and a tensor."""
        return WORD * values + part.nbytes <= WORD * self.width

    def parts_of_last_sum(self, values: int, part: Tensor) -> Tensor:
        """Return the tensors that came with the last sum, in the order of ranks.

        Args:
            values: The number of numbers.
            part: This rank's tensor; all have one size, and come before the next use of this table.
        """
        whole = part.new_empty(len(self._slots[0]) * part.size(0), *part.shape[1:])
        taken, size = whole.view(-1).view(torch.uint8), part.nbytes
        for rank, at in enumerate(self._slots[self._number % 2]):
            begin = WORD * (at + 1 + values)
            taken[rank * size : (rank + 1) * size].copy_(self._bytes[begin : begin + size])
        return whole

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of tensors of all ranks, in fp64.

        Args:
            part: At most `width` numbers, on the CPU.
        """
        slot, at = self._begin()
        size = part.numel()
        self._words[at + 1 : at + 1 + size].copy_(part.reshape(-1))
        self._show(at)
        self._wait(self._number)
        begins = [begin + 1 for begin in self._slots[slot]]
        total = self._words[begins[0] : begins[0] + size].clone()
        for begin in begins[1:]:
            total += self._words[begin : begin + size]
        return total.view(part.shape)

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        """Write the tensors of all ranks into one, in the order of ranks.

        Args:
            part: This rank's; contiguous, on the CPU, of the same size on all ranks.
            whole: The target; contiguous.
        """
        given, taken = part.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8)
        size, most = given.numel(), WORD * self.width
        for first in range(0, size, most):
            slot, at = self._begin()
            count = min(most, size - first)
            begin = WORD * (at + 1)
            self._bytes[begin : begin + count].copy_(given[first : first + count])
            self._show(at)
            self._wait(self._number)
            for rank, other in enumerate(self._slots[slot]):
                begin, to = WORD * (other + 1), rank * size + first
                taken[to : to + count].copy_(self._bytes[begin : begin + count])

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over the ranks.

        Args:
            tensors: Contiguous, on the CPU; of the same sizes and dtypes on all ranks.

        Raises:
            RuntimeError: If these are of other sizes.
        """
        most = WORD * (self.width - 1)
        for tensor in tensors:
            for part in torch.split(tensor.view(-1), most // tensor.element_size()):
                self._average(part)

    def _average(self, part: Tensor) -> None:
        slot, at = self._begin()
        begins, size = self._slots[slot], part.nbytes
        rows = [self._bytes[WORD * (begin + 2) :][:size].view(part.dtype) for begin in begins]
        # Divided before they are added up, as by DDP: a sum may be too large for fp16.
        torch.div(part, len(rows), out=rows[self._rank])
        self._heads[at + 1] = size
        self._show(at)
        self._wait(self._number)
        if any(self._heads[begin + 1] != size for begin in begins):
            raise RuntimeError("the ranks average gradients of different sizes")
        torch.add(rows[0], rows[1], out=part)
        for row in rows[2:]:
            part += row

    def _begin(self) -> tuple[int, int]:
        """Return which of this rank's two slots is free, and its offset."""
        self._number += 1
        slot = self._number % 2
        return slot, self._slots[slot][self._rank]

    def _show(self, at: int) -> None:
        """Publish this rank's row."""
        # Taking a lock is a memory barrier: no processor may show the number before the row.
        for _ in range(2):
            with self._fence:
                pass
        self._heads[at] = self._number

    def _wait(self, number: int) -> None:
        heads, looks = self._heads, 0
        for at in self._slots[number % 2]:
            while heads[at] != number:
                looks += 1
                rest(looks)
        for _ in range(2):
            with self._fence:
                pass


@functools.cache
def _row(size: int) -> struct.Struct:
    return struct.Struct(f"{size}d")
