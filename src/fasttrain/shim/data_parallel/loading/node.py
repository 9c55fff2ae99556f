"""The ranks of this node, and the sockets on which the first hands descriptors to the others."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fasttrain.shim.data_parallel.loading import lines
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process import rank_variables

LOOK_S = 0.5
_NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Node:
    """This rank's sockets.

    Attributes:
        first: The global rank of the node's first rank, which reads.
        is_first: Whether that is this one.
        lines: To all other ranks of the node by rank, or to the first alone.
    """

    first: int
    is_first: bool
    lines: tuple[socket.socket, ...]

    def begin(self, number: int) -> list[socket.socket]:
        """Return new sockets to the other ranks for what the first reads next.

        Args:
            number: Counts what is read, alike on all ranks.

        Raises:
            RuntimeError: The first rank has ended, or reads something else.
        """
        if self.is_first:
            return [_handed(line, number) for line in self.lines]
        packet, descriptors = lines.receive(self.lines[0])
        if not descriptors or _NUMBER.unpack(packet)[0] != number:
            raise RuntimeError(f"rank {self.first} reads another DataLoader, or has ended")
        return [lines.own(socket.socket(fileno=descriptors[0]))]


def _handed(line: socket.socket, number: int) -> socket.socket:
    here, there = lines.pair()
    # A rank that has ended is found where it is waited for.
    with there, suppress(OSError):
        lines.send(line, _NUMBER.pack(number), there.fileno())
    return lines.own(here)


def met(ranks: Ranks) -> Node | None:
    """Meet the other ranks of the node; every rank must call this alike.

    Returns:
        None where ranks of a node can't hand each other descriptors, on all ranks alike.
    """
    first, size = _first_and_size(ranks)
    store: Any = ranks.store
    with ranks.waits():
        found = _lines(ranks, first, size)
        if found is None:
            store.set("loaders/all", "no")
        elif store.add("loaders/met", 1) == ranks.world_size:
            store.set("loaders/all", "yes")
        together = store.get("loaders/all") == b"yes"
    if not together or found is None:
        lines.close(*(found or ()))
        return None
    return Node(first, ranks.rank == first, tuple(found))


def _first_and_size(ranks: Ranks) -> tuple[int, int]:
    size = int(rank_variables.get("LOCAL_WORLD_SIZE", "1"))
    local_rank = int(rank_variables.get("LOCAL_RANK", str(ranks.rank % size)))
    return ranks.rank - local_rank, size


def _lines(ranks: Ranks, first: int, size: int) -> list[socket.socket] | None:
    store, key = ranks.store, f"loaders/{first}"
    if ranks.rank != first:
        name = store.get(key).decode()
        try:
            return [lines.connected(name, ranks.rank)] if name else None
        except OSError:  # another view of the network
            return None
    if size == 1:
        return []
    try:
        listener, name = lines.listening()
    except (OSError, AttributeError):  # no such sockets
        listener, name = None, ""
    store.set(key, name)
    if listener is None:
        return None
    with listener:
        return _come(listener, store, size - 1)


def _come(listener: socket.socket, store: Any, count: int) -> list[socket.socket] | None:
    """Wait for ranks, one of which may fail to come."""
    come: dict[int, socket.socket] = {}
    listener.settimeout(LOOK_S)
    while len(come) < count:
        try:
            line, rank = lines.accepted(listener)
        except OSError:
            if store.check(["loaders/all"]):
                lines.close(*come.values())
                return None
        else:
            come[rank] = line
    return [come[rank] for rank in sorted(come)]
