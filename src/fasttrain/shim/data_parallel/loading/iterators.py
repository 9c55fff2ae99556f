"""The reading rank forwards its workers' results; the others iterate over stand-ins for them."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from fasttrain.shim.data_parallel.loading import transport
from fasttrain.shim.data_parallel.loading.transport import packed, unpacked

# The reading rank's side: it forwards its workers' results to the other ranks of its node.
#
# It runs torch's own iterator with torch's own workers. Whatever comes out of its result queue (a
# batch, an error, a timeout), the other ranks get in the same order.


MESSAGE, NOTHING, FAILED, WORKERS = b"M", b"N", b"F", b"W"  # kinds of packets to other ranks
WAITING = struct.Struct("<q")  # sent by a waiting rank: how many results it has had
WORKER = struct.Struct("<q?")  # process id, and whether it is alive
_TICKET = struct.Struct("<qq")  # a result's worker process id and number
LONGEST = 1000  # characters of an error
LATE_S = 30.0  # timeout for a packet that a worker has sent before its result


class GivenResults:
    """Wraps torch's result queue, in the workers and in the rank that has started them.

    Args:
        results: torch's queue.
        readers: One socket to each other rank of the node.
    """

    def __init__(self, results: Any, readers: list[socket.socket]) -> None:
        self.workers: list[Any] = []  # processes
        self.given = 0
        self._results = results
        self._all_readers, self._readers = tuple(readers), readers
        self._had: dict[int, int] = {}  # results that a waiting reader has had, by its index
        inside, outside = transport.pair()
        outside.settimeout(LATE_S)
        self._inside, self._outside = inside, transport.own(outside)
        self._here: dict[
            bytes, tuple[bytes, list[int]]
        ] = {}  # by ticket, what came before its turn
        self._owner, self._count = os.getpid(), 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a spawned worker needs."""
        return {name: vars(self)[name] for name in ("_results", "_inside", "_owner", "_count")}

    def __getattr__(self, name: str) -> Any:
        if name == "_results":  # not set yet while unpickling: would recurse
            raise AttributeError(name)
        return getattr(self._results, name)

    # --- in a worker

    def put(self, message: Any) -> None:
        """Send a result to the rank, and a packed copy for the other ranks."""
        if os.getpid() == self._owner:  # torch wakes its pin-memory thread by this
            self._results.put((b"", message))
            return
        self._count += 1
        ticket = _TICKET.pack(os.getpid(), self._count)
        with suppress(BrokenPipeError, ConnectionResetError):  # the rank has stopped reading
            try:
                descriptor = packed(message)
            except Exception as error:  # noqa: BLE001 - of objects of any kind
                text = f"{type(error).__name__}: {error}"[:LONGEST]
                transport.send(self._inside, ticket + text.encode())
            else:
                try:
                    transport.send(self._inside, ticket, descriptor)
                finally:
                    os.close(descriptor)
        self._results.put((ticket, message))

    # --- in the rank

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return a result as torch's queue does, after sending it to the other ranks."""
        try:
            ticket, message = self._results.get(*args, **kwargs)
        except Exception:
            self._send(NOTHING + self._alive())
            raise
        if ticket:
            self._give(ticket)
        return message

    def announce(self) -> None:
        """Send the other ranks the workers' process ids."""
        self._send(WORKERS + self._alive())

    def _give(self, ticket: bytes) -> None:
        while ticket not in self._here:
            packet, descriptors = transport.receive(self._outside)
            self._here[packet[: _TICKET.size]] = packet[_TICKET.size :], descriptors
        text, descriptors = self._here.pop(ticket)
        self._send(MESSAGE if descriptors else FAILED + text, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def _alive(self) -> bytes:
        return b"".join(WORKER.pack(w.pid or 0, w.is_alive()) for w in self.workers)

    def _send(self, packet: bytes, *descriptors: int) -> None:
        self.given += not packet.startswith(WORKERS)
        for reader in list(self._readers):
            try:
                transport.send(reader, packet, *descriptors)
            except OSError:  # it stopped reading, as after a break; divergence shows elsewhere
                self._readers.remove(reader)
                transport.close(reader)

    def awaits_more(self) -> int | None:
        """Return the index of a rank that waits for a result not read yet; None if none does.

        Called by another thread than the reading one.
        """
        for place, reader in enumerate(self._all_readers):
            with suppress(OSError):  # no more packets at the moment
                while packet := transport.receive(reader, socket.MSG_DONTWAIT)[0]:
                    (self._had[place],) = WAITING.unpack(packet)
            if reader in self._readers and self._had.get(place, -1) >= self.given:
                return place
        return None

    def end(self) -> None:
        """Stop; not named ``close``, which is torch's queue's, and called by workers, too."""
        transport.close(self._inside, self._outside, *self._all_readers)
        for _, descriptors in self._here.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._here.clear()


class GivingContext:
    """A multiprocessing context whose first queue also sends its results to other ranks.

    Source: torch 2.13, ``_MultiProcessingDataLoaderIter.__init__``: the first is the result queue.
    """

    def __init__(self, context: Any, readers: list[socket.socket]) -> None:
        self.results: GivenResults | None = None
        self._context = context
        self._readers = readers

    def Queue(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Return a queue; the first one is wrapped."""
        made = self._context.Queue(*args, **kwargs)
        if self.results is None:
            made = self.results = GivenResults(made, self._readers)
        return made

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Return a worker process, not started yet."""
        worker = self._context.Process(*args, **kwargs)
        if self.results is not None:
            self.results.workers.append(worker)
        return worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


# The other ranks' side: torch's own iterator, with stand-ins for queues and worker processes.
#
# Tasks are dropped, since the workers get theirs from the reading rank; results come from that
# rank.


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
        if kind == NOTHING:
            self._note_states(content)
            raise queue.Empty
        if kind == FAILED:
            raise RuntimeError(f"a batch can't be sent to other ranks: {content.decode()}")
        try:
            return unpacked(descriptors[0])
        finally:
            os.close(descriptors[0])

    def _next(self) -> tuple[bytes, list[int]]:
        quiet = False
        while True:
            try:
                packet, descriptors = transport.receive(self._line)
            except TimeoutError:
                if not quiet:
                    self._report_waiting()
                quiet = True
                continue
            except OSError:  # closed by another thread
                return b"", []
            if packet[:1] == WORKERS:
                self._note_states(packet[1:])
                continue
            self._taken += 1
            return packet, descriptors

    def _report_waiting(self) -> None:
        with suppress(OSError):
            self._line.send(WAITING.pack(self._taken), socket.MSG_DONTWAIT)

    def _note_states(self, content: bytes) -> None:
        for worker, state in zip(self.workers, WORKER.iter_unpack(content), strict=False):
            worker.pid, worker.alive = state

    def put(self, _: Any) -> None:
        """Wake the reading thread, so that it ends."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Stop taking results."""
        transport.close(self._line)


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
