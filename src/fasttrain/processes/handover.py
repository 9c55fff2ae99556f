"""Hands each rank of a run the sockets over which it gets its turns.

A single worker inherits its socket. Ranks are started by torchrun's agent, which closes what it
doesn't know: they fetch theirs by a name of the launcher's, in the abstract namespace of Linux. So
no file is left, and mounts of the ranks' own change nothing. Any user can see and take such names,
so that each end checks whose the other one is.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from contextlib import ExitStack, suppress

from fasttrain.model.errors import ExitCode, FasttrainError

HIGH_DESCRIPTOR = 150  # in the worker, the script's own files keep the low ones
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user and group


class Handover:
    """The launcher's side; a watch of the run.

    Rank 0 gets the socket that leads to whoever gives the turns, and one for each other rank; that
    one gets the other end of it.

    Args:
        descriptor: The socket of the run; closed when rank 0 has it, so that its end is seen.
        ranks: Number of ranks.

    Attributes:
        address: What `fetch` needs.
    """

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.address = f"fasttrain-{secrets.token_hex(16)}"
        pairs = [socket.socketpair() for _ in range(1, ranks)]
        ends = [[descriptor, *(leads.detach() for leads, _ in pairs)]]
        ends += [[follows.detach()] for _, follows in pairs]
        self._waiting = [
            (_listening(_name(self.address, rank)), ends_of) for rank, ends_of in enumerate(ends)
        ]

    def heard(self, signum: int) -> None:
        """Signals mean nothing for it."""

    def tick(self) -> None:
        """Hand the ranks that have come what is theirs."""
        for listener, ends in [*self._waiting]:
            with suppress(BlockingIOError):
                peer, _ = listener.accept()
                with peer:
                    if _is_own(peer) and self._hand(peer, ends):
                        self._waiting.remove((listener, ends))
                        _close(listener, ends)

    def close(self) -> None:
        """Close what nobody has fetched."""
        for listener, ends in self._waiting:
            _close(listener, ends)
        self._waiting.clear()

    @staticmethod
    def _hand(peer: socket.socket, ends: list[int]) -> bool:
        """Hand sockets over; False if the other process has ended."""
        try:
            for end in ends:  # one by one: the kernel limits how many go together
                socket.send_fds(peer, [b"\0"], [end])
        except OSError:
            return False
        return True


def fetch(address: str, rank: int) -> list[int]:
    """Return the descriptors of the sockets of one rank: the other end's first.

    They aren't passed on to programs that the script starts.

    Raises:
        FasttrainError: ``prove-socket`` if nobody hands them over.
    """
    taken: list[int] = []
    with socket.socket(socket.AF_UNIX) as peer, ExitStack() as undo:
        try:
            peer.connect(_name(address, rank))
            if not _is_own(peer):
                raise _nobody("another user's process listens there")
            while (received := socket.recv_fds(peer, 1, 1, _CLOEXEC))[0]:
                for low in received[1]:
                    undo.callback(os.close, low)
                    taken.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR))
        except OSError as error:
            raise _nobody(error.strerror or str(error)) from error
    if not taken:
        raise _nobody("the launcher has ended")
    return taken


# Without it a process that another thread starts meanwhile would inherit them.
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def _name(address: str, rank: int) -> str:
    return f"\0{address}-{rank}"


def _listening(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)  # noqa: FBT003 - no keyword
    listener.bind(name)
    listener.listen()
    return listener


def _is_own(peer: socket.socket) -> bool:
    """True if the process at the other end is this user's."""
    read = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(read)[1] == os.geteuid())


def _close(listener: socket.socket, ends: list[int]) -> None:
    listener.close()
    for end in ends:
        os.close(end)


def _nobody(why: str) -> FasttrainError:
    return FasttrainError(
        "this rank can't get its turns",
        why=why,
        fix="prove it again; only fasttrain run --prove starts these ranks",
        slug="prove-socket",
        exit_code=ExitCode.CANNOT_START,
    )
