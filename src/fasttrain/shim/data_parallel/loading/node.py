"""The sockets through which the first rank of a node sends file descriptors to the others.

They have abstract names, so that no file remains. Any user of the machine can connect to such a
name, so that both sides check whose process is at the other end.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import struct
import weakref
from array import array
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process import rank_variables

CONNECT_S = 10.0
MOST_BYTES = 4096  # per packet
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_ROOM = socket.CMSG_SPACE(4 * struct.calcsize("i"))  # for descriptors
_NUMBER = struct.Struct("<i")
_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def can_be_had() -> bool:
    """True if this system supports it: Linux does."""
    needed = (socket, "SO_PEERCRED"), (socket, "SOCK_SEQPACKET"), (os, "memfd_create")
    return all(hasattr(owner, name) for owner, name in needed)


def own(line: socket.socket) -> socket.socket:
    """Return a socket that will be closed in forked children."""
    _close_in_children()
    _OPEN.add(line)
    return line


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listening() -> tuple[socket.socket, str]:
    """Return a listening socket and its name."""
    listener = own(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    name = f"fasttrain-{secrets.token_hex(16)}"
    listener.bind(f"\0{name}")
    listener.listen(128)
    listener.settimeout(CONNECT_S)
    return listener, name


def accepted(listener: socket.socket) -> tuple[socket.socket, int]:
    """Return a socket to a process of this user that has connected, and its rank.

    Raises:
        OSError: If none connects in time.
    """
    while True:
        line, _ = listener.accept()
        line.settimeout(CONNECT_S)
        if is_same_users(line):
            line, rank = own(line), _NUMBER.unpack(line.recv(_NUMBER.size))[0]
            line.settimeout(None)
            return line, rank
        line.close()


def connected(name: str, rank: int) -> socket.socket:
    """Return a socket to the process of this user that listens by a name.

    Raises:
        OSError: If there is none, or it is another user's.
    """
    line = own(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    line.settimeout(CONNECT_S)
    line.connect(f"\0{name}")
    if not is_same_users(line):
        line.close()
        raise PermissionError("the socket is another user's")
    line.send(_NUMBER.pack(rank))
    line.settimeout(None)
    return line


def is_same_users(line: socket.socket) -> bool:
    """True if the process at the other end is this user's."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def send(line: socket.socket, packet: bytes, *descriptors: int) -> None:
    """Send one packet with descriptors, which the sender keeps.

    Raises:
        OSError: If the other end is closed.
    """
    line.sendmsg([packet], _rights(descriptors))


def receive(line: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return one packet and its descriptors; an empty one after the last.

    Raises:
        OSError: If there is none yet, with a non-blocking flag or a timeout.
    """
    while True:
        # Raised once if the other side left unread packets; those that it has sent come after it.
        # Not socket.recv_fds, which ignores its flags (Python 3.11).
        packet, rights, _, _ = line.recvmsg(MOST_BYTES, _ROOM, flags | socket.MSG_CMSG_CLOEXEC)
        return packet, _descriptors(rights)


def _rights(descriptors: tuple[int, ...]) -> list[tuple[int, int, Any]]:
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    found = array("i")
    for level, kind, content in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return list(found)


def close(*lines: socket.socket) -> None:
    """Shut sockets down, even if a forked child still holds them, and close them."""
    for line in lines:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
        line.close()


@functools.cache
def _close_in_children() -> None:
    def in_child() -> None:
        for line in list(_OPEN):
            line.close()

    os.register_at_fork(after_in_child=in_child)


LOOK_S = 0.5
_CALL_NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Node:
    """This rank's sockets to other ranks of its node.

    Attributes:
        first: The global rank of the node's first rank, which reads.
        is_first: True if that is this rank.
        lines: On the first rank, sockets to all others in the order of ranks; else to the first.
    """

    first: int
    is_first: bool
    lines: tuple[socket.socket, ...]

    def begin(self, number: int) -> list[socket.socket]:
        """Return new sockets to the other ranks for the next loader that the first rank reads.

        Args:
            number: Number of the loader, counted alike on all ranks.

        Raises:
            RuntimeError: If the first rank has ended, or reads another loader.
        """
        if self.is_first:
            return [_handed(line, number) for line in self.lines]
        packet, descriptors = receive(self.lines[0])
        if not descriptors or _CALL_NUMBER.unpack(packet)[0] != number:
            raise RuntimeError(f"rank {self.first} reads another DataLoader, or has ended")
        return [own(socket.socket(fileno=descriptors[0]))]


def _handed(line: socket.socket, number: int) -> socket.socket:
    here, there = pair()
    # A rank that has ended is noticed when this one waits for it.
    with there, suppress(OSError):
        send(line, _CALL_NUMBER.pack(number), there.fileno())
    return own(here)


def met(ranks: Ranks) -> Node | None:
    """Connect to the other ranks of the node; every rank must call this.

    Returns:
        None on all ranks if some ranks of a node can't send each other descriptors.
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
        close(*(found or ()))
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
            return [connected(name, ranks.rank)] if name else None
        except OSError:  # another network namespace
            return None
    if size == 1:
        return []
    try:
        listener, name = listening()
    except (OSError, AttributeError):  # the system has no such sockets
        listener, name = None, ""
    store.set(key, name)
    if listener is None:
        return None
    with listener:
        return _come(listener, store, size - 1)


def _come(listener: socket.socket, store: Any, count: int) -> list[socket.socket] | None:
    """Accept the other ranks' connections; None if one of them fails to connect."""
    come: dict[int, socket.socket] = {}
    listener.settimeout(LOOK_S)
    while len(come) < count:
        try:
            line, rank = accepted(listener)
        except OSError:
            if store.check(["loaders/all"]):
                close(*come.values())
                return None
        else:
            come[rank] = line
    return [come[rank] for rank in sorted(come)]
