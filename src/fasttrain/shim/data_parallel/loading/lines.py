"""Packets and descriptors between the ranks of one node.

The sockets have abstract names, so that nothing of them is left in the file system. Everybody on
the machine can read such a name: both sides look who the other one is.
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
from typing import Any

CONNECT_S = 10.0
MOST_BYTES = 4096  # of a packet
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_ROOM = socket.CMSG_SPACE(4 * struct.calcsize("i"))  # for descriptors
_NUMBER = struct.Struct("<i")
_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def can_be_had() -> bool:
    """Return whether this system has what is needed: Linux."""
    needed = (socket, "SO_PEERCRED"), (socket, "SOCK_SEQPACKET"), (os, "memfd_create")
    return all(hasattr(owner, name) for owner, name in needed)


def own(line: socket.socket) -> socket.socket:
    """Have a socket closed in processes that are forked from this one."""
    _close_in_children()
    _OPEN.add(line)
    return line


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two sockets that lead to each other."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listening() -> tuple[socket.socket, str]:
    """Return a socket that waits for others, and its name."""
    listener = own(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    name = f"fasttrain-{secrets.token_hex(16)}"
    listener.bind(f"\0{name}")
    listener.listen(128)
    listener.settimeout(CONNECT_S)
    return listener, name


def accepted(listener: socket.socket) -> tuple[socket.socket, int]:
    """Return a socket to another process of this user that has connected, and its rank.

    Raises:
        OSError: None comes.
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
        OSError: There is none, or it is another user's.
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
    """Return whether the process at the other end is this user's."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def send(line: socket.socket, packet: bytes, *descriptors: int) -> None:
    """Send one packet with descriptors, which the sender keeps.

    Raises:
        OSError: Nobody is there any more.
    """
    line.sendmsg([packet], _rights(descriptors))


def receive(line: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return one packet and its descriptors; an empty one when there will be no more.

    Raises:
        OSError: There is none yet, on a socket that doesn't wait.
    """
    while True:
        with suppress(ConnectionResetError):  # it left without having read all; its own come first
            # Not socket.recv_fds, which takes flags and drops them (Python 3.11).
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
    """End sockets, also where a forked process still holds them."""
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
