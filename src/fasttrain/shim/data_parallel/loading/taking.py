"""The other ranks' side: torch's own iterator, with stand-ins for queues and worker processes.

Tasks are dropped, since the workers get theirs from the reading rank; results come from that rank.
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

QUIET_S = 1.0  # after which a waiting rank notifies the reading rank


class TakenResults:
    """Stands in for the result queue.

    Args:
        line: The socket to the rank that reads.
        waits: Returns a context that marks a wait for other ranks.
    """

    def __init__(self, line: socket.socket, waits: Callable[[], AbstractContextManager[Any]]):
        self.workers: list[Worker] = []
        self._line = line
        self._line.settimeout(QUIET_S)
        self._waits = waits
        self._taken = 0

    def get(self, *_: Any, **__: Any) -> Any:
        """Return what torch's own queue has returned on the reading rank.

        It has no timeout: a result that came in time there must arrive here.

        Raises:
            queue.Empty: If the queue timed out there, or no more results will come.
            RuntimeError: If the result can't be pickled.
        """
        with self._waits():
            packet, descriptors = self._next()
        if not packet:
            for worker in self.workers:
                worker.alive = False
            raise queue.Empty
        kind, content = packet[:1], packet[1:]
        if kind == giving.NOTHING:
            self._note_states(content)
            raise queue.Empty
        if kind == giving.FAILED:
            raise RuntimeError(f"a batch can't be sent to other ranks: {content.decode()}")
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
                    self._report_waiting()
                quiet = True
                continue
            except OSError:  # closed by another thread
                return b"", []
            if packet[:1] == giving.WORKERS:
                self._note_states(packet[1:])
                continue
            self._taken += 1
            return packet, descriptors

    def _report_waiting(self) -> None:
        with suppress(OSError):
            self._line.send(giving.WAITING.pack(self._taken), socket.MSG_DONTWAIT)

    def _note_states(self, content: bytes) -> None:
        for worker, state in zip(self.workers, giving.WORKER.iter_unpack(content), strict=False):
            worker.pid, worker.alive = state

    def put(self, _: Any) -> None:
        """Wake the reading thread, so that it ends."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Stop taking results."""
        node.close(self._line)


class Tasks:
    """Stands in for a worker's task queue."""

    def put(self, task: Any) -> None:
        """Drop a task."""

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Worker:
    """Stands in for a worker process, which is another rank's child.

    Attributes:
        pid: 0 until it is known.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.alive = self.daemon = False
        self.exitcode = None

    def start(self) -> None:
        """Mark it as alive."""
        self.alive = True

    def is_alive(self) -> bool:
        """True if it was alive when its rank last checked."""
        return self.alive

    def join(self, timeout: float | None = None) -> None:  # noqa: ARG002 - torch names it
        """Mark it as ended, without waiting: its own rank waits for it."""
        self.alive = False

    def terminate(self) -> None:
        """Mark it as ended: its own rank terminates it."""
        self.alive = False


class TakingContext:
    """Stands in for a multiprocessing context.

    Source: torch 2.13, ``_MultiProcessingDataLoaderIter.__init__``: the first is the result queue.
    """

    def __init__(
        self, line: socket.socket, waits: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.results = TakenResults(line, waits)
        self._given = False

    def Queue(self, *_: Any, **__: Any) -> Any:  # noqa: N802
        """Return a stand-in for a queue."""
        if self._given:
            return Tasks()
        self._given = True
        return self.results

    def Event(self) -> threading.Event:  # noqa: N802
        """Return an event of this process."""
        return threading.Event()

    def Process(self, *_: Any, **__: Any) -> Worker:  # noqa: N802
        """Return a stand-in for a worker."""
        worker = Worker()
        self.results.workers.append(worker)
        return worker
