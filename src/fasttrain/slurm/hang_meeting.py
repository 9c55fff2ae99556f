"""Tasks of one job tell each other, in the run directory, that nothing goes on at their nodes."""

from __future__ import annotations

from pathlib import Path

from fasttrain.files.writing import write_private
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.hang import Hang
from fasttrain.model.job import Allocation
from fasttrain.model.reading import load


class HangMeeting:
    """The files of one attempt of a job, one for each task at which nothing goes on.

    Args:
        folder: Where the tasks of this attempt meet.
        place: This task's place.
    """

    see_each_other = True

    def __init__(self, folder: Path, place: Allocation) -> None:
        self._folder = folder
        self._own = folder / _name(place.task)
        self._names = [_name(task) for task in range(place.tasks)]

    def say(self, found: Hang | None) -> None:
        """Write what was found, or take it back."""
        if found:
            write_private(self._own, dumps(found))
        else:
            self._own.unlink(missing_ok=True)

    def said(self) -> tuple[Hang, ...]:
        """Give what all tasks have found; empty while one of them goes on."""
        # Listed, not asked one by one: NFS remembers for a minute that a file is not there.
        there = {path.name for path in self._folder.iterdir()}
        if not there.issuperset(self._names):
            return ()
        try:
            return tuple(load(Hang, self._folder / name) for name in self._names)
        except (OSError, CodecError):
            return ()  # taken back just now


def _name(task: int) -> str:
    return f"hang-{task}.json"
