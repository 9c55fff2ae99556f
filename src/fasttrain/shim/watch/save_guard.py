"""Warns before a save that won't fit on the disk, by the size of the last checkpoint like it."""

from __future__ import annotations

import functools
import os
import re
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import serialization

from fasttrain.files import room_at
from fasttrain.model.errors import size
from fasttrain.shim.hooks import patching

_CHECK = "_check_save_filelike"  # of torch.serialization, in 2.0 to 2.13
_NUMBERS = re.compile(r"\d+")


class SaveGuard:
    """Checks the free disk space when `torch.save` is called.

    Wraps torch's check of the arguments, which has returned before torch writes. So no frame of
    ours is in the traceback of a save that fails, and `torch.save` itself is unchanged.

    Attributes:
        warnings: The warnings that were printed.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._sizes: dict[str, int] = {}
        self._last: Path | None = None

    def install(self, undo: ExitStack) -> None:
        """Check the disk space before each save to a path."""
        if hasattr(serialization, _CHECK):
            patching.wrap(serialization, _CHECK, self._watched, undo)
        else:
            self.warnings.append(f"checkpoints are not measured: this torch has no {_CHECK}")

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def check(f: Any) -> Any:
            if isinstance(f, str | os.PathLike):
                # A path that can't be checked is left to the save itself.
                with suppress(OSError, ValueError):
                    self._look(Path(os.fsdecode(f)))
            return original(f)

        return check

    def _look(self, path: Path) -> None:
        last, self._last = self._last, path
        if last is not None and last.is_file():
            self._sizes[_kind(last)] = last.stat().st_size
        self._compare(path)

    def _compare(self, path: Path) -> None:
        """Warn if the last checkpoint of this kind would not fit."""
        needed = self._sizes.get(_kind(path))
        if needed is None:
            return
        free = room_at(path.parent).free_bytes
        # torch truncates a file that it replaces first, which frees its blocks.
        replaced = path.stat().st_blocks * 512 if path.is_file() else 0
        if free is not None and free + replaced < needed:
            self._warn(
                f"{path} may not fit: the last one like it has {size(needed)}, and"
                f" {size(free + replaced)} is free"
            )
            del self._sizes[_kind(path)]  # no further warning until another save shows its size

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        print(f"fasttrain: warning: {warning}", file=sys.stderr, flush=True)  # noqa: T201


def _kind(path: Path) -> str:
    """Return a checkpoint's path with its numbers masked: ``run/step-#/model.pt``."""
    return _NUMBERS.sub("#", str(path))
