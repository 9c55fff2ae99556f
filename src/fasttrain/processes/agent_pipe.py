"""The pipe between the launcher of a node and torchrun's agent, by which they agree on restarts.

The launcher hands one end down to the agent, and to nobody else: the agent's workers don't get it.
An agent without one, as where a dry run was pasted, has no launcher.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import MutableMapping
from typing import NamedTuple

from fasttrain.model.attempts import Message
from fasttrain.model.codec import dumps, loads

VARIABLE = "FASTTRAIN_AGENT_PIPE"  # number of the agent's descriptor
CHUNK_BYTES = 65536
# Numbers of stdin, stdout and stderr, which are free where the caller closed them, are not taken.
LOWEST_DESCRIPTOR = 3


class AgentPipe:
    """One end; a message is a line of JSON."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._read = b""

    def send(self, message: Message) -> None:
        """Send a message; no-op where the other process has ended."""
        try:
            self._end.sendall(dumps(message, indent=None).encode() + b"\n")
        except OSError:
            return

    def receive(self) -> Message | None:
        """Wait for the next message; None where the other process has ended."""
        return self._next(0)

    def look(self) -> Message | None:
        """Return the next message, or None where there is none yet."""
        return self._next(socket.MSG_DONTWAIT)

    def _next(self, flags: int) -> Message | None:
        while b"\n" not in self._read:
            try:
                data = self._end.recv(CHUNK_BYTES, flags)
            except OSError:  # nothing is there yet, or the other process was killed
                return None
            if not data:
                return None
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return loads(Message, line)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


class Handed(NamedTuple):
    """The agent's end, as the launcher hands it down.

    Attributes:
        source: Its descriptor in the launcher.
        number: The descriptor that the agent is to get. It is taken in the launcher, too, so that
            it is none that the caller of fasttrain wants the script to inherit.
    """

    source: int
    number: int

    @property
    def environ(self) -> dict[str, str]:
        """The variable by which the agent finds it."""
        return {VARIABLE: str(self.number)}

    def close(self) -> None:
        """Close the launcher's copies."""
        os.close(self.source)
        os.close(self.number)


def open_pipe() -> tuple[AgentPipe, Handed]:
    """Return the launcher's end, and the agent's; no process inherits either by itself."""
    ours, theirs = socket.socketpair()
    with theirs:
        source, number = (
            fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR) for _ in range(2)
        )
    return AgentPipe(ours), Handed(source, number)


def inherited(environ: MutableMapping[str, str]) -> AgentPipe | None:
    """Return the agent's end, and take it away from the processes that it starts."""
    number = environ.pop(VARIABLE, "")
    if not number.isdecimal():
        return None
    try:
        end = socket.socket(fileno=int(number))
    except OSError:  # the variable is somebody else's
        return None
    end.set_inheritable(False)
    return AgentPipe(end)
