"""This worker's connection to the other ranks of its run.

The ranks first communicate through torchrun's store, which the script never sees. The process group
is created only when there is something to average, so that a script that creates one itself can
still do so.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fasttrain.model.vendors import group_backend
from fasttrain.shim.data_parallel.node_memory import WORD, Board, on_one_node
from fasttrain.shim.data_parallel.tensor_sums import strided_parts
from fasttrain.shim.process import entry, true_clock

MEET_TIMEOUT = timedelta(minutes=30)  # a rank may read its data before it imports torch
NUMBERS = 128  # summed at once
BOARD_BYTES = 1 << 24  # size of the memory that the ranks of a node share
MEANS_BYTES = 1 << 23  # of that for gradients
GATHERED = 1 << 26  # bytes per rank gathered through that memory; more goes by collectives
_AS_BYTES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)  # unsupported by gloo
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # 2.13


class _Wait:
    """Marks a block in which a rank may wait for others."""

    __slots__ = ("_outermost", "_ranks")

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._outermost = False

    def __enter__(self) -> None:
        self._outermost = not self._ranks.waiting_since_s
        if self._outermost:
            self._ranks.waiting_since_s = true_clock.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            self._ranks.waiting_since_s = 0.0


@dataclass(frozen=True)
class PendingCheck:
    """A check that all ranks have begun the same, which their next communication makes.

    Attributes:
        tag: Number of what this rank has begun, as in `Ranks.meet`.
        begun: The same in words, with its place.
        check: Makes it by itself, before a communication that compares nothing.
    """

    tag: int
    begun: str
    check: Callable[[], None]


_ALONG = 1 << 19  # in the tag of a rank that sends a tensor along
WITHIN = " within: "  # between what a rank is doing, in a report, and the words of a `PendingCheck`


class Ranks:
    """All ranks, seen from one of them.

    Attributes:
        rank: Global rank of this worker.
        world_size: Number of ranks.
        store: Key-value store that all ranks of this attempt share.
        joined: True if this object created the process group.
        joining: True while this object creates it.
        boardless: True if the ranks are on one node but could not share all memory that they want.
        waiting_since_s: `time.monotonic` when this rank began to wait for others; 0 if it doesn't
            wait.
        spread: The relative variance of the values in the last `meet`.
        reports: What each rank was doing when a `meet` failed, by rank; with what it had begun.
        pending: A check that is still to be made.
        means: Averages gradients on the CPU; None if the ranks share no memory for that.
    """

    def __init__(self, rank: int, world_size: int, store: Any, collectives: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.joined = self.joining = self.boardless = False
        self.waiting_since_s = self.spread = 0.0
        self.on_join: list[Callable[[], None]] = []
        self.reports: list[str] = []
        self.pending: PendingCheck | None = None
        self._exchanged: tuple[Tensor, Tensor] | None = None
        self._home = os.getpid(), threading.main_thread().ident
        self._collectives = collectives
        self._gathered = 0
        self._board: Board | None = None
        self.means: Board | None = None

    @classmethod
    def at_store(cls, collectives: str, *, agent: bool) -> Ranks:
        """Connect to the store that torchrun's agent hosts, or else rank 0.

        Args:
            collectives: Backend for the devices of the run, such as ``nccl``.
            agent: True if there is an agent.
        """
        get = entry.get
        world_size = int(get("WORLD_SIZE"))
        torchs: Any = dist
        store = torchs.TCPStore(
            get("MASTER_ADDR"),
            int(get("MASTER_PORT")),
            is_master=not agent and int(get("RANK")) == 0,
            wait_for_workers=False,
            timeout=MEET_TIMEOUT,
        )
        if not agent:
            # A script that initialises torch.distributed itself must not host a second store.
            entry.put("TORCHELASTIC_USE_AGENT_STORE", "True")
        # A restarted or re-formed group must not read keys of the group before it.
        attempt = f"{get('TORCHELASTIC_RESTART_COUNT', '0')}/{world_size}"
        prefix = torchs.PrefixStore(f"/fasttrain/{attempt}", store)
        return cls(int(get("RANK")), world_size, prefix, collectives)

    def join(self) -> None:
        """Create the process group unless it exists."""
        if self.joined:
            return
        for listen in self.on_join:
            listen()
        backend = group_backend(self._collectives)
        torchs: Any = dist
        group = torchs.PrefixStore("group", self.store)
        prints = sys.excepthook
        self.joining = True
        try:
            dist.init_process_group(
                backend, store=group, rank=self.rank, world_size=self.world_size
            )
        finally:
            self.joining = False
            sys.excepthook = prints  # torch's begins each line of a traceback with the rank
        self.joined = True
        self._board = self._table("board", BOARD_BYTES)
        tables = [self._board]
        if backend == "gloo":
            self.means = self._table("means", MEANS_BYTES)
            tables.append(self.means)
        self.boardless = None in tables and on_one_node(self.world_size)

    def _table(self, name: str, size: int) -> Board | None:
        width = max(NUMBERS, size // (2 * WORD * self.world_size) - 1)
        return Board.of_node(self.store, self.rank, self.world_size, width, name)

    def leave(self) -> None:
        """Destroy the process group."""
        if self.joined and dist.is_initialized():
            dist.destroy_process_group()
        self.joined = False

    def is_here(self) -> bool:
        """True in the rank's main thread, where it can communicate with others.

        Threads run in another order on each rank, and a forked child has no connection.
        """
        return (os.getpid(), threading.get_ident()) == self._home

    def is_forked(self) -> bool:
        """True in a child process that a rank has forked, which inherits the levers."""
        return os.getpid() != self._home[0]

    def waits(self) -> _Wait:
        """Return a context that marks a time in which this rank may wait for others."""
        return _Wait(self)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place; a sparse one on a device, as a new one."""
        self._check_first()
        board = self._board
        if is_summed_on_host(tensor):
            return self.sum(tensor.cpu()).to(tensor.device)
        with self.waits():
            if board is not None and _fits(tensor, board.width):
                tensor.copy_(board.sum(tensor))
            else:
                dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated in the first dimension.

        Args:
            tensor: Contiguous, of one shape on all ranks, with at least one dimension.
        """
        self._check_first()
        if self._exchanged is not None:
            part, whole = self._exchanged
            if tensor.data_ptr() == part.data_ptr() and tensor.shape == part.shape:
                self._exchanged = None  # a second one gets memory of its own
                return whole
        whole = tensor.new_empty(self.world_size * tensor.size(0), *tensor.shape[1:])
        with self.waits():
            if self._board is not None and tensor.is_cpu and tensor.nbytes <= GATHERED:
                self._board.all_gather(tensor, whole)
            elif tensor.device.type not in ("cpu", "cuda"):  # the one form that all backends have
                dist.all_gather(list(whole.chunk(self.world_size)), tensor)
            elif tensor.dtype in _AS_BYTES:
                _all_gather(whole.view(torch.uint8), tensor.view(torch.uint8))
            else:
                _all_gather(whole, tensor)
        return whole

    def meet(
        self,
        tag: int,
        doing: Callable[[], str],
        values: Sequence[float] = (),
        part: Tensor | None = None,
    ) -> bool:
        """Wait for all ranks; return True if all have come with the same tag.

        Args:
            tag: Number of what the rank is doing; below 2**20, so that sums of squares are exact.
            doing: Returns it in words, which all ranks get by `reports` if the tags differ.
            values: At most 32 finite numbers; `spread` is then how far they differ.
            part: A contiguous tensor that `all_gather` is called with next, of one type and shape
                on all ranks with this tag. It is sent along if that saves a wait; a rank without
                one has another tag then, since its memory order may be decided by its rows.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            tag ^= pending.tag
        pairs = [number for value in values[:32] for number in (value, value * value)]
        board, self._exchanged = self._board, None
        if board is None or (part is not None and not board.holds(2 + len(pairs), part)):
            part = None
        if part is not None:
            tag ^= _ALONG
        numbers = (float(tag), float(tag * tag), *pairs)
        with self.waits():
            total, squares, *others = self.sum_numbers(numbers, part)
        n = self.world_size
        spreads = [
            (n * of_squares - of_values * of_values) / (n * of_squares)
            for of_values, of_squares in zip(others[::2], others[1::2], strict=True)
            if of_squares
        ]
        self.spread = max(spreads, default=0.0)
        if squares * n == total * total:  # no variance
            if part is not None and board is not None:
                self._exchanged = part, board.parts_of_last_sum(len(numbers), part)
            return True
        text = doing() if pending is None else f"{doing()}{WITHIN}{pending.begun}"
        self.reports = self.gather(text)
        return False

    def sum_numbers(self, numbers: Sequence[float], part: Tensor | None = None) -> list[float]:
        """Return the sums over all ranks; the caller marks the wait.

        Args:
            numbers: At most `NUMBERS`; a rank with fewer than another one adds zeros.
            part: Goes along in the memory that the ranks share.
        """
        if self._board is not None:
            return self._board.sum_numbers(numbers, part)
        # All of one size: an all-reduce of different sizes would hang.
        padded = [*numbers, *[0.0] * (NUMBERS - len(numbers))]
        tensor = torch.tensor(padded, dtype=torch.float64, device="cpu")
        dist.all_reduce(tensor)
        sums: list[float] = tensor[: len(numbers)].tolist()
        return sums

    def end_call(self) -> None:
        """Forget what a call of a model has left to be checked or gathered."""
        self.pending = self._exchanged = None

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Copy rank 0's values to every rank, in place."""
        self._check_first()
        with torch.no_grad(), self.waits():
            for tensor in tensors:
                for expanded in strided_parts(tensor.detach()):
                    part = _unexpanded(expanded)
                    whole = part.contiguous()
                    as_bytes = whole.dtype in _AS_BYTES
                    dist.broadcast(whole.view(-1).view(torch.uint8) if as_bytes else whole, 0)
                    if whole.data_ptr() != part.data_ptr():
                        part.copy_(whole)

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank; every rank must call this."""
        self._check_first()
        self._gathered += 1
        key = f"gather/{self._gathered}"
        self.store.set(f"{key}/{self.rank}", text)
        with self.waits():
            found = [self.store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]
        if self._gathered > 1:  # all have read those before
            self.store.delete_key(f"gather/{self._gathered - 1}/{self.rank}")
        return found

    def _check_first(self) -> None:
        if self.pending is not None:
            self.pending.check()


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that isn't shown again by `expand`, and may be written to."""
    for dim, step in enumerate(tensor.stride()):
        if not step and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_summed_on_host(tensor: Tensor) -> bool:
    """True if only gloo can sum a tensor: the collectives of devices can't sum sparse ones.

    Source: ``ProcessGroupNCCL::allreduce_sparse`` of torch 2.13.
    """
    return tensor.is_sparse and not tensor.is_cpu


def _fits(tensor: Tensor, width: int) -> bool:
    """True if a tensor can be summed in shared memory."""
    plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_complex()
    return plain and tensor.is_floating_point() and tensor.numel() <= width
