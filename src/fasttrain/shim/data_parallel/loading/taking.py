"""A rank that doesn't read: torch's own iterator, on workers that another rank has.

What stands in the places of queues and processes takes part in nothing: tasks are dropped, since
the workers get them from the rank that has them, and results come from there.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from fasttrain.shim.data_parallel.loading import giving, node
from fasttrain.shim.data_parallel.loading.packing import unpacked

QUIET_S = 1.0  # after which a rank that waits tells the one that reads


class TakenResults:
    """Stands for the queue of results.

    Args:
        line: The socket to the rank that reads.
        waits: Marks a time in which this rank waits for others.
    """

    def __init__(self, line: socket.socket, waits: Callable[[], AbstractContextManager[Any]]):
        self.workers: list[Worker] = []
        self._line = line
        self._line.settimeout(QUIET_S)
        self._waits = waits
        self._taken = 0

    def get(self, *_: Any, **__: Any) -> Any:
        """Return what torch's own queue has given the rank that reads.

        It has no time of its own: what came in time there must come here.

        Raises:
            queue.Empty: Nothing came there in time, or nothing will come any more.
            RuntimeError: The result can't be pickled.
        """
        with self._waits():
            packet, descriptors = self._next()
        if not packet:
            for worker in self.workers:
                worker.alive = False
            raise queue.Empty
        kind, told = packet[:1], packet[1:]
        if kind == giving.NOTHING:
            self._look(told)
            raise queue.Empty
        if kind == giving.FAILED:
            raise RuntimeError(f"a batch can't be given to other ranks: {told.decode()}")
        try:
            return unpacked(descriptors[0])
        finally:
            os.close(descriptors[0])

    def _next(self) -> tuple[bytes, list[int]]:
        quiet = False
        while True:
            try:
                packet, descriptors = node.receive(self._line)
            except TimeoutError:
                if not quiet:
                    self._say_that_it_waits()
                quiet = True
                continue
            except OSError:  # closed by another thread
                return b"", []
            if packet[:1] == giving.WORKERS:
                self._look(packet[1:])
                continue
            self._taken += 1
            return packet, descriptors

    def _say_that_it_waits(self) -> None:
        with suppress(OSError):
            self._line.send(giving.WAITING.pack(self._taken), socket.MSG_DONTWAIT)

    def _look(self, told: bytes) -> None:
        for worker, state in zip(self.workers, giving.WORKER.iter_unpack(told), strict=False):
            worker.pid, worker.alive = state

    def put(self, _: Any) -> None:
        """Wake the thread that reads, which is to end."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Take no more."""
        node.close(self._line)


class Tasks:
    """Stands for the queue of tasks of a worker."""

    def put(self, task: Any) -> None:
        """Drop a task."""

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Worker:
    """Stands for a worker process, which is a child of another rank.

    Attributes:
        pid: 0 until it is known.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.alive = self.daemon = False
        self.exitcode = None

    def start(self) -> None:
        """Be alive."""
        self.alive = True

    def is_alive(self) -> bool:
        """Return whether it was when its rank last looked."""
        return self.alive

    def join(self, timeout: float | None = None) -> None:  # noqa: ARG002 - torch names it
        """Wait for nothing: it ends with the rank that has it."""
        self.alive = False

    def terminate(self) -> None:
        """Leave that to the rank that has it."""
        self.alive = False


class TakingContext:
    """Takes the place of a context of multiprocessing.

    Source: torch 2.13, ``_MultiProcessingDataLoaderIter.__init__``, whose first queue is that of
    the results.
    """

    def __init__(
        self, line: socket.socket, waits: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.results = TakenResults(line, waits)
        self._given = False

    def Queue(self, *_: Any, **__: Any) -> Any:  # noqa: N802
        """Return what stands for a queue."""
        if self._given:
            return Tasks()
        self._given = True
        return self.results

    def Event(self) -> threading.Event:  # noqa: N802
        """Return an event of this process."""
        return threading.Event()

    def Process(self, *_: Any, **__: Any) -> Worker:  # noqa: N802
        """Return what stands for a worker."""
        worker = Worker()
        self.results.workers.append(worker)
        return worker
