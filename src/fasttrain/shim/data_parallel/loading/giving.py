"""The reading rank's side: it forwards its workers' results to the other ranks of its node.

It runs torch's own iterator with torch's own workers. Whatever comes out of its result queue (a
batch, an error, a timeout), the other ranks get in the same order.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import Any

from fasttrain.shim.data_parallel.loading import node
from fasttrain.shim.data_parallel.loading.packing import packed

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
        inside, outside = node.pair()
        outside.settimeout(LATE_S)
        self._inside, self._outside = inside, node.own(outside)
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
                node.send(self._inside, ticket + text.encode())
            else:
                try:
                    node.send(self._inside, ticket, descriptor)
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
            packet, descriptors = node.receive(self._outside)
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
                node.send(reader, packet, *descriptors)
            except OSError:  # it stopped reading, as after a break; divergence shows elsewhere
                self._readers.remove(reader)
                node.close(reader)

    def awaits_more(self) -> int | None:
        """Return the index of a rank that waits for a result not read yet; None if none does.

        Called by another thread than the reading one.
        """
        for place, reader in enumerate(self._all_readers):
            with suppress(OSError):  # no more packets at the moment
                while packet := node.receive(reader, socket.MSG_DONTWAIT)[0]:
                    (self._had[place],) = WAITING.unpack(packet)
            if reader in self._readers and self._had.get(place, -1) >= self.given:
                return place
        return None

    def end(self) -> None:
        """Stop; not named ``close``, which is torch's queue's, and called by workers, too."""
        node.close(self._inside, self._outside, *self._all_readers)
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
