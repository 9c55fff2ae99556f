"""Ranks that are threads of one process: collectives that add up over what each thread brings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
WAIT_S = 90.0  # for a thread that another one has left alone


class _Meeting:
    """Where all threads leave a tensor, and read those of all."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=WAIT_S)
        self.left: list[Any] = [None] * world_size


class FakeRanks:
    """One thread among the others; it stands in for `data_parallel.ranks.Ranks`."""

    means = None

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world_size = len(meeting.left)
        self.joined = True
        self.sums = 0
        self._meeting = meeting

    def is_here(self) -> bool:
        """Take each thread for the main thread of a rank."""
        return True

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the threads, in place where it is dense."""
        self.sums += 1
        meeting = self._meeting
        meeting.left[self.rank] = tensor.clone()
        meeting.barrier.wait()
        shapes = {(t.shape, t.dtype) for t in meeting.left}
        assert len(shapes) == 1, f"the ranks don't add up the same thing: {shapes}"
        whole = sum(meeting.left[1:], meeting.left[0])
        meeting.barrier.wait()
        return whole if tensor.is_sparse else tensor.copy_(whole)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all threads, one behind the other."""
        meeting = self._meeting
        meeting.left[self.rank] = tensor.clone()
        meeting.barrier.wait()
        shapes = {(t.shape, t.dtype) for t in meeting.left}
        assert len(shapes) == 1, f"the ranks don't gather the same thing: {shapes}"
        whole = tensor.new_empty(self.world_size * tensor.size(0), *tensor.shape[1:])
        whole.copy_(torch.cat(meeting.left))  # whose own memory order is that of its parts
        meeting.barrier.wait()
        return whole


def on_ranks(world_size: int, act: Callable[[FakeRanks], T]) -> list[T]:
    """Return what a function gives on each of several ranks; the first error of any is raised."""
    meeting = _Meeting(world_size)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(FakeRanks(rank, meeting))
        except BaseException as error:  # noqa: BLE001 - raised again below, by the test's own thread
            meeting.barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Of the class and put back by each thread, so that one may have put back another one's.
    DistributedDataParallel._active_ddp_module = None
    broken = threading.BrokenBarrierError
    for error in sorted(errors, key=lambda error: isinstance(error, broken)):
        raise error
    return results


def average(gradients: list[list[Tensor | None]]) -> list[Tensor]:
    """Return the mean over the ranks of their gradients; a missing one counts as zeros."""
    found: list[Tensor] = []
    for each in zip(*gradients, strict=True):
        like = next(g for g in each if g is not None)
        total: Any = sum((torch.zeros_like(like) if g is None else g) for g in each)
        found.append(total / len(each))
    return found
