"""Warns of a disk that is nearly full, while there is time to free space."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fasttrain.files.writing import FEW_BYTES, Room, room_at
from fasttrain.model.errors import size

NOTHING_FREE = "nothing is free"
LOOK_S = 10.0  # on a network file system, each look is a request to its server
# Of a rank: its log, report, events, failure, two of stacks, heartbeat, and two drafts of them.
FILES_OF_RANK, FILES_OF_RUN = 9, 20


class DiskWatch:
    """Checks the free space of a run directory's file system.

    Args:
        run_dir: The run directory.
        ranks: Ranks of this node.
        tell: Prints a message to the user.
        clock: Monotonic time in seconds.

    Attributes:
        warnings: What the user was warned of.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: int,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.warnings: list[str] = []
        self._run_dir = run_dir
        self._files = FILES_OF_RUN + FILES_OF_RANK * ranks
        self._tell = tell
        self._clock = clock
        self._told: set[str] = set()
        self._looked_s = -LOOK_S

    def heard(self, signum: int) -> None:
        """Signals mean nothing for the disk."""

    def tick(self) -> None:
        """Check when it is due, and warn of each thing once."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            room = room_at(self._run_dir)
        except OSError as error:
            self._say("asked", f"how much room {self._run_dir} has isn't known: {error.strerror}")
            return
        for what, warning in self._problems(room):
            self._say(what, warning)

    def _problems(self, room: Room) -> Iterator[tuple[str, str]]:
        where = f"on the disk of {self._run_dir}"
        if room.free_bytes == 0:
            yield (
                "full",
                f"{NOTHING_FREE} {where}: logs and events continue once there is room again",
            )
        elif room.free_bytes is not None and room.free_bytes < FEW_BYTES:
            yield "bytes", f"only {size(room.free_bytes)} is free {where}: a checkpoint may not fit"
        if room.free_files is not None and room.free_files < self._files:
            yield "files", f"only {room.free_files} more files fit {where}"

    def _say(self, what: str, warning: str) -> None:
        if what in self._told:
            return
        self._told.add(what)
        self.warnings.append(warning)
        self._tell(f"warning: {warning}")
