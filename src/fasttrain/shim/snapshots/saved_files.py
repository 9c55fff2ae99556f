"""Knows the files that the script has saved, and puts them back after a replay.

A resumed run may save somewhere else than the run before, as into a folder named by the time, or
delete at its start what was there. What a replay saves holds weights that were never trained. So
each snapshot lists the saved files. From then on, whoever deletes one of them only moves it into
the snapshot's folder, and at the end of the replay each file that it saved is given the content of
its counterpart.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.process.refusal import refuse

Entry = tuple[str, bool]  # a path, and whether a file was there
_ASIDE = "files"  # folder in a snapshot's


class SavedFiles:
    """The files that the script has saved and not removed since.

    Attributes:
        acts: True on the one rank whose files are real.
    """

    def __init__(self, *, acts: bool) -> None:
        self.acts = acts
        self._paths: dict[str, None] = {}  # in the order in which they were first saved
        self._then: list[Entry] = []  # those that the snapshot lists
        self._aside = Path()
        self._needed: dict[str, int] = {}  # files of the snapshot that are still in their place

    # --- what the script does with them, in a run and in its replay alike

    def save(self, path: str) -> None:
        """Note that a file is saved."""
        self._paths[path] = None

    def remove(self, path: str) -> None:
        """Note that a file or folder is removed."""
        for one in beneath(path, self._paths):
            del self._paths[one]

    def rename(self, src: str, dst: str) -> None:
        """Note that a file or folder has another name; a file may have been made unseen."""
        for one in beneath(src, self._paths) or [src]:
            self._paths.pop(one, None)
            self.save(dst + one.removeprefix(src))

    # --- snapshots

    def state(self) -> list[Entry]:
        """Return the files."""
        return [(path, Path(path).is_file()) for path in self._paths]

    def need(self, files: list[Entry], snapshot: Path) -> None:
        """From now on keep what a snapshot lists, instead of what the one before listed."""
        self._then, self._aside = files, snapshot / _ASIDE
        self._needed = {path: n for n, (path, there) in enumerate(files) if there}

    def keep(self, path: str, *, overwritten: bool = False) -> None:
        """Keep what the snapshot needs of a file or folder that is going to be changed.

        Args:
            path: The file or folder.
            overwritten: True if it is to be written in place, else it is removed or renamed.
        """
        if not (self.acts and self._needed):
            return
        for one in beneath(path, self._needed):
            aside = self._aside / str(self._needed.pop(one))
            # If it can't be kept, the resumed run finds it gone.
            with suppress(OSError):
                if not aside.exists():  # else kept by an attempt that ended in its replay
                    _link(one, aside)
                    if overwritten:
                        Path(one).unlink()

    # --- the end of a replay

    def put_back(self, made: Iterable[str]) -> list[str]:
        """Restore what the files that a replay has saved contained at the snapshot.

        Returns:
            Those that have another name than then.

        Raises:
            SystemExit: ``snapshot-files`` if a content is gone, or can't be known.
        """
        if not self.acts:
            return []
        made = [path for path in sorted(made) if Path(path).is_file()]
        numbers = counterparts([path for path, _ in self._then], list(self._paths))
        sources: dict[str, Path | None] = {}
        for path in made:
            source = self._source(numbers.get(path), made)
            if isinstance(source, FasttrainError):
                for other in made:  # else the next attempt would take them for the run's own
                    Path(other).unlink()
                refuse(source)
            sources[path] = source
        for path, content in sources.items():
            if content is None:
                Path(path).unlink()
            else:
                shutil.copyfile(content, path)
        return [path for path in made if sources[path] and self._then[numbers[path]][0] != path]

    def _source(self, number: int | None, made: list[str]) -> Path | FasttrainError | None:
        """Return the file that has the content; None if there was no file, or an error."""
        if number is None:
            return _unknown(made)
        path, there = self._then[number]
        for source in (self._aside / str(number), Path(path)):
            if source.is_file() and str(source) not in made:
                return source
        return _gone(path) if there else None


def beneath(path: str, names: Iterable[str]) -> list[str]:
    """Return the names that are a path, or in a folder that it names."""
    return [name for name in names if name == path or name.startswith(path + os.sep)]


def counterparts(then: list[str], now: list[str]) -> dict[str, int]:
    """Return which file of the run before each file of now is, by its number.

    Both are in the order in which the script first saved them. Names that are equal belong together
    first, then those in folders of equal names, and so on; last those that end alike. Where several
    are alike, they follow each other in the same order, provided that there are as many.
    """
    found: dict[str, int] = {}
    for key in _KEYS:
        both: tuple[dict[Any, list[Any]], ...] = (defaultdict(list), defaultdict(list))
        for number, path in enumerate(then):
            if number not in found.values():
                both[0][key(path)].append(number)
        for path in now:
            if path not in found:
                both[1][key(path)].append(path)
        for name, paths in both[1].items():
            if len(paths) == len(both[0].get(name, ())):
                found.update(zip(paths, both[0][name], strict=True))
    return found


def _without_digits(path: str) -> str:
    parts = groupby(Path(path).name, str.isdigit)
    return "".join("#" if digits else "".join(part) for digits, part in parts)


_KEYS: tuple[Callable[[str], Any], ...] = (
    lambda path: path,
    lambda path: Path(path).parts[-2:],
    lambda path: Path(path).name,
    _without_digits,  # a time stamp
    lambda path: Path(path).suffix,  # the id of a run
)


def _link(path: str, aside: Path) -> None:
    aside.parent.mkdir(exist_ok=True)
    try:
        os.link(path, aside)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, aside)


def _gone(path: str) -> FasttrainError:
    return FasttrainError(
        "the run can't go on from its snapshot",
        why=f"the run before saved {path}, which is gone",
        fix="put it back, or an empty file in its place if the script doesn't need it;"
        " without --resume the run starts from the beginning",
        slug="snapshot-files",
    )


def _unknown(made: list[str]) -> FasttrainError:
    return FasttrainError(
        "the run can't go on from its snapshot",
        why="it saves to other files than the run before, and which of those they stand for can't"
        f" be known: {', '.join(made)}",
        fix="name the files that a script saves by its arguments and by steps, or use --preempt"
        " signal; without --resume the run starts from the beginning",
        slug="snapshot-files",
    )
