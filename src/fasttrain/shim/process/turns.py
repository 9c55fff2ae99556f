"""Lets this worker train only when it is its turn, where several take turns on one machine."""

from __future__ import annotations

import os
import random
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from fasttrain.model.codec import CodecError, dumps, loads
from fasttrain.model.errors import FasttrainError
from fasttrain.model.proof import Proof, Took, Turn
from fasttrain.processes.handover import fetch
from fasttrain.shim.process.import_hook import after_import
from fasttrain.shim.process.refusal import refuse

BEAT_S = 1.0  # who waits for its turn has not hung
# For the others, once a rank has ended; if it has failed, the agent ends this one in that time.
GRACE_S = 3.0
Beat = Callable[[], object]


class Turns:
    """The worker's end of a socket that leads to whoever gives the turns.

    Args:
        descriptor: The socket; it isn't passed on to programs that the script starts.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - no keyword
        self._descriptor = descriptor
        self._left = b""
        self._pid = os.getpid()
        self.turn = Turn(0)

    @property
    def is_own(self) -> bool:
        """True in the worker itself, and not in a process that was forked from it."""
        return os.getpid() == self._pid

    def wait(self, beat: Beat = lambda: None) -> Turn:
        """Wait for the next turn and return it.

        Args:
            beat: Called every second.

        Raises:
            SystemExit: There is nobody any more who could give one.
        """
        with _others_stopped():
            while b"\n" not in self._left:
                if not select.select([self._descriptor], [], [], BEAT_S)[0]:
                    beat()
                    continue
                read = b""
                with suppress(ConnectionResetError):  # the other end has left a report unread
                    read = os.read(self._descriptor, 4096)
                if not read:
                    sys.exit(0)
                self._left += read
        line, _, self._left = self._left.partition(b"\n")
        self.turn = loads(Turn, line)
        return self.turn

    def report(self, took: Took) -> None:
        """Report what was done in this turn."""
        data = memoryview(dumps(took, indent=None).encode() + b"\n")
        with suppress(BrokenPipeError):  # the next `wait` ends this process
            while data:
                data = data[os.write(self._descriptor, data) :]


@contextmanager
def _others_stopped() -> Iterator[None]:
    """Stop processes of multiprocessing in the block, such as the workers of a DataLoader.

    Else they would read ahead while the script waits, and reading would seem to take no time.
    """
    stopped: list[int] = []
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        stopped = [child.pid for child in multiprocessing.active_children() if child.pid]
    _send(stopped, "SIGSTOP")
    try:
        yield
    finally:
        _send(stopped, "SIGCONT")


def _send(pids: list[int], name: str) -> None:
    import signal

    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[name])


class LeadingTurns(Turns):
    """The turns of rank 0, who passes them on to the other ranks.

    Every rank makes the steps of a turn. Rank 0 reports it when all have done so: no rank trains
    any more while it is the turn of another run. The loss of a step is the mean over the ranks,
    each of which has its own part of the batch if the script handles ranks itself.

    Args:
        descriptor: The socket that leads to whoever gives the turns.
        others: Those that lead to the other ranks, in their order.
    """

    def __init__(self, descriptor: int, others: Sequence[int]) -> None:
        super().__init__(descriptor)
        self._others = [_Other(rank, end) for rank, end in enumerate(others, 1)]

    def wait(self, beat: Beat = lambda: None) -> Turn:
        """Wait for the next turn, pass it on and return it."""
        turn = super().wait(beat)
        for other in self._others:
            other.send(turn)
        return turn

    def report(self, took: Took) -> None:
        """Report what this rank did, once all ranks are at the end of this turn.

        While it waits there is no heartbeat: ranks that wait for each other have hung.
        """
        parted = self._meet(took)
        all_took = [took, *(other.took for other in self._others)]
        losses = tuple(map(_mean, zip(*(it.losses for it in all_took), strict=False)))
        if parted or len(losses) < len(took.losses):  # a rank has not come
            losses = took.losses
        super().report(
            replace(took, losses=losses, ended=took.ended or bool(parted), parted=parted)
        )

    def _meet(self, own: Took) -> str:
        """Wait for all ranks; return how their steps differ, empty if they don't."""
        left = [*self._others]
        until_s = time.monotonic() + GRACE_S if own.ended else None
        while left and (until_s is None or time.monotonic() < until_s):
            ready = select.select(left, [], [], BEAT_S)[0]
            left = [other for other in left if other not in ready or not other.read()]
            if until_s is None and any(other.took.ended for other in self._others):
                until_s = time.monotonic() + GRACE_S
        apart = [it for it in self._others if it not in left and it.differs(own)]
        if not apart:
            return ""
        if not own.ended:  # a rank that has failed has ended, too
            time.sleep(GRACE_S)
        return apart[0].compared(own)


def _mean(of_ranks: Sequence[float | None]) -> float | None:
    known = [loss for loss in of_ranks if loss is not None]
    if len(known) < len(of_ranks):
        return None
    # Of equal numbers, it is that number, whatever their sum is rounded to.
    return known[0] if len(set(known)) == 1 else sum(known) / len(known)


class _Other:
    """Rank 0's end of the socket that leads to another rank."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self.took = Took(0)
        self._rank, self._descriptor = rank, descriptor
        self._left = b""

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self._descriptor

    def send(self, turn: Turn) -> None:
        """Have it take a turn."""
        with suppress(OSError):  # it has ended
            os.write(self._descriptor, dumps(turn, indent=None).encode() + b"\n")

    def read(self) -> bool:
        """Read what has come; True if it has reported, or ended without a word."""
        read = b""
        with suppress(OSError):
            read = os.read(self._descriptor, 1 << 16)
        self._left += read
        if not read:
            self.took = replace(self.took, losses=(), ended=True)
            return True
        line, end, rest = self._left.partition(b"\n")
        if end:
            self._left = rest
            with suppress(CodecError):  # of the script, which has found the descriptor
                self.took = loads(Took, line)
        return bool(end)

    def differs(self, own: Took) -> bool:
        """True if it isn't where rank 0 is."""
        return (self.took.steps, self.took.ended) != (own.steps, own.ended)

    def compared(self, own: Took) -> str:
        """Return where both are."""
        return (
            f"rank {self._rank} {'ended' if self.took.ended else 'went on'} after"
            f" {self.took.steps:,} steps, and rank 0 {'ended' if own.ended else 'went on'} after"
            f" {own.steps:,}"
        )


_of_this_worker: list[Turns] = []


def begin(asked: Proof, rank: int = 0) -> None:
    """Take the socket, and seed what can be seeded before the script begins.

    The first turn begins once torch is imported: two scripts that start don't have to wait for each
    other.
    """
    _of_this_worker[:] = [_turns(asked, rank)]
    random.seed(asked.seed)
    after_import("numpy.random", lambda module: module.seed(asked.seed))


def _turns(asked: Proof, rank: int) -> Turns:
    if not asked.address:
        return Turns(asked.descriptor)
    try:
        descriptor, *others = fetch(asked.address, rank)
    except FasttrainError as error:
        refuse(error)
    return LeadingTurns(descriptor, others) if others else Turns(descriptor)


def of_this_worker() -> Turns:
    """Return the turns of this worker, which `begin` has made."""
    return _of_this_worker[0]
