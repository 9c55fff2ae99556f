"""Reads what workers append to their files while they run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fasttrain.model.attempts import DIVIDER
from fasttrain.model.reading import open_regular


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
