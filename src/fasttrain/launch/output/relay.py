"""Carries the output of rank 0 to the terminal and into its log, byte for byte.

A stream that is a terminal for fasttrain is a terminal (a pty) for the script, any other is a
pipe, so that ``isatty`` and buffering are what they would be without fasttrain.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import selectors
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fasttrain.files import open_regular
from fasttrain.launch.output.display import Display, write_all
from fasttrain.model.attempts import DIVIDER
from fasttrain.model.places import REMAINING_OUTPUT_PROGRAM, RUN_MARK, program

CHUNK_BYTES = 65536
SETTLE_S = 0.005  # between two looks for output that is still to be carried
DRAIN_S = 0.3  # without output after the script's end: what is left running prints later
MOST_DRAIN_S = 2.0  # however much that prints: the receipt must not wait for it


class Relay:
    """Streams of one child process.

    Attributes:
        child_ends: For stdout (1) and stderr (2), the descriptor that the child is to get.
        log_error: Why the log lacks some of the output; empty when it is complete.
        held: Whether output is being passed on at the moment; stays true while its reader blocks.
    """

    def __init__(self, log: Path, display: Display, *, again: bool = False) -> None:
        """Open the streams.

        Args:
            log: The file that all of it is written to.
            display: Shows it.
            again: Whether further children may get the same streams.
        """
        self._again = again
        self.child_ends: dict[int, int] = {}
        self.log_error = ""
        self.held = False
        self._display = display
        self._log = self._open_log(log)
        self._selector = selectors.DefaultSelector()
        self._terminals: list[int] = []
        self._ours: list[int] = []  # read ends of the streams
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="fasttrain-relay", daemon=True)
        self._open_streams()

    def _open_log(self, log: Path) -> int:
        try:
            # O_NONBLOCK: opening a pipe in its place would block until somebody reads it.
            return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
        except OSError as error:  # a full disk must not keep the script from starting
            self.log_error = error.strerror or str(error)
            return os.open(os.devnull, os.O_WRONLY)

    def _open_streams(self) -> None:
        opened: dict[tuple[int, int], int] = {}
        for descriptor in (1, 2):
            if (sys.__stdout__, sys.__stderr__)[descriptor - 1] is None:
                # Closed by the caller, so the script finds it closed, too. The number may be in use
                # by now, because any file of ours may have got it.
                continue
            identity = os.fstat(descriptor)
            key = (identity.st_dev, identity.st_ino)
            if key not in opened:
                opened[key] = self._open(descriptor)
            # `2>&1`, or a terminal for both: one stream, so that the order of the output is kept.
            self.child_ends[descriptor] = opened[key]

    def _open(self, descriptor: int) -> int:
        if os.isatty(descriptor):
            ours, theirs = os.openpty()
            _pass_bytes_through(theirs)
            self._terminals.append(ours)
            copy_window_size(descriptor, ours)
        else:
            ours, theirs = os.pipe()
        self._selector.register(ours, selectors.EVENT_READ, descriptor)
        self._ours.append(ours)
        return theirs

    def start(self) -> None:
        """Start to carry output, once the child has its ends."""
        if not self._again:
            self._close_child_ends()
        self._thread.start()

    def _close_child_ends(self) -> None:
        for end in set(self.child_ends.values()):
            os.close(end)

    def resize(self) -> None:
        """Set the script's terminal to the size of ours."""
        for terminal in self._terminals:
            for descriptor in (1, 2):
                copy_window_size(descriptor, terminal)

    def settle(self) -> None:
        """Wait until what the child has written so far is in the log, but not for a slow reader."""
        due_s = time.monotonic() + DRAIN_S
        waiting = select.poll()
        for end in tuple(self._ours):  # the relay's thread takes away what it closes
            waiting.register(end, select.POLLIN)
        # Asked in this order: the relay sets `held` before it reads, and clears it once all that
        # it has read is in the log.
        while any(ready & select.POLLIN for _, ready in waiting.poll(0)) or self.held:
            if time.monotonic() >= due_s:
                return
            time.sleep(SETTLE_S)

    def finish(self) -> None:
        """Carry what is left and stop.

        What the script left running keeps its streams: another process carries them from now on.
        """
        if self._thread.ident is None:  # nothing could be started
            self._close_child_ends()
        else:
            if self._again:
                self._close_child_ends()
            os.write(self._wake_write, b"x")
            self._thread.join()
            self._hand_over()
        for key in list(self._selector.get_map().values()):
            self._close(key.fd)
        for descriptor in (self._log, self._wake_write):
            os.close(descriptor)
        self._selector.close()

    def _hand_over(self) -> None:
        """Start a process that carries the streams that others still hold."""
        shows = self._display.shows
        streams = {
            key.fd: key.data if shows else -1
            for key in self._selector.get_map().values()
            if key.fd in self._ours
        }
        if not streams:
            return
        for descriptor in (self._log, *streams):
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - has no keyword
        words = [program(REMAINING_OUTPUT_PROGRAM), str(self._log)]
        words += [f"{read}:{shown}" for read, shown in streams.items()]
        # Without the run's mark: it is no part of the run, and ends by itself.
        environ = {name: value for name, value in os.environ.items() if name != RUN_MARK}
        try:
            os.posix_spawn(
                sys.executable,
                (sys.executable, "-IS", *words),
                environ,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                setsigmask=signal.valid_signals(),
            )
        except OSError as error:
            self.log_error = error.strerror or str(error)

    def _run(self) -> None:
        until_s = math.inf
        while len(self._selector.get_map()) > 1:
            ending = until_s < math.inf
            ready = self._selector.select(DRAIN_S if ending else None)
            if ending and (not ready or time.monotonic() >= until_s):
                return  # what comes later is carried by another process
            for key, _ in ready:
                if key.fd == self._wake_read:
                    os.read(self._wake_read, 1)
                    until_s = time.monotonic() + MOST_DRAIN_S
                else:
                    self.held = True
                    self._carry(key.fd, key.data)
                    self.held = False

    def _carry(self, ours: int, descriptor: int) -> None:
        try:
            data = os.read(ours, CHUNK_BYTES)
        except OSError:  # EIO: the last holder of a pty's other end is gone
            data = b""
        if not data:
            self._close(ours)
            return
        try:
            write_all(self._log, data)
        except OSError as error:  # a full disk must not stop the script's output
            self.log_error = error.strerror or str(error)
        try:
            self._display.write(descriptor, data)
        except OSError:
            self._close(ours)  # our reader went away; the script gets SIGPIPE, as it would alone

    def _close(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        if descriptor in self._ours:
            self._ours.remove(descriptor)
        os.close(descriptor)


def _pass_bytes_through(terminal: int) -> None:
    """Switch output processing off: our own terminal does it already."""
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)


def copy_window_size(source: int, target: int) -> None:
    """Set a terminal to the rows and columns of another; no-op where either has none."""
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


# Reads what workers append to their files while they run.


class Tail:
    """New whole lines of a file that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def lines(self, *, rest: bool = False) -> Iterator[bytes]:
        """Yield the lines that were completed since the last call.

        Args:
            rest: Also yield a last line without a line end, because no more will come.
        """
        try:
            with open_regular(self._path) as file:
                file.seek(self._position)
                data = file.read()
        except OSError:  # it doesn't exist yet, or the script put a directory or a pipe there
            return
        end = len(data) if rest else data.rfind(b"\n") + 1
        self._position += end
        yield from data[:end].splitlines(keepends=True)


class EventTail:
    """The latest event of one rank."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)

    def latest(self) -> dict[str, Any] | None:
        """Return the newest event since the last call, or None."""
        lines = list(self._tail.lines())
        if not lines:
            return None
        try:
            event = json.loads(lines[-1])
        except ValueError:  # cut off by a full disk
            return None
        return event if isinstance(event, dict) else None


class RankTails:
    """Output of shown ranks that write to their own logs, each line with its rank."""

    def __init__(self, run_dir: Path, shows: Callable[[int], bool]) -> None:
        self._run_dir = run_dir
        self._shows = shows
        self._tails: dict[int, Tail] = {}

    def lines(self, *, rest: bool = False) -> Iterator[bytes]:
        """Yield new lines of all followed ranks as ``[rank 3] …``."""
        # Searched each time: an elastic run assigns ranks to this node only while it runs.
        for path in self._run_dir.glob("rank-*.log"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal() and self._shows(int(number)):
                self._tails.setdefault(int(number), Tail(path))
        for rank, tail in sorted(self._tails.items()):
            for line in tail.lines(rest=rest):
                if line.startswith(DIVIDER.encode()):
                    continue  # the line is fasttrain's, and stdout is for the script's
                text = line if line.endswith(b"\n") else line + b"\n"
                yield b"[rank %d] %b" % (rank, text)
