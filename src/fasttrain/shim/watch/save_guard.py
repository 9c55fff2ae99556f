"""Tells of a checkpoint that won't fit before it is tried, by the size of the last one like it."""

from __future__ import annotations

import functools
import os
import re
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import serialization

from fasttrain.files.writing import room_at
from fasttrain.model.printable import size
from fasttrain.shim.hooks import patching

_CHECK = "_check_save_filelike"  # of torch.serialization, in 2.0 to 2.13
_NUMBERS = re.compile(r"\d+")


class SaveGuard:
    """Looks at the disk when `torch.save` is called, and is gone when it writes.

    It is in the place of a check that torch makes of its arguments, so that no frame of ours is in
    the traceback of a save that fails, and `torch.save` is the function that it was.

    Attributes:
        warnings: What was told.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._sizes: dict[str, int] = {}
        self._last: Path | None = None

    def install(self, undo: ExitStack) -> None:
        """Look at the disk before each save to a path."""
        if hasattr(serialization, _CHECK):
            patching.wrap(serialization, _CHECK, self._watched, undo)
        else:
            self.warnings.append(f"checkpoints are not measured: this torch has no {_CHECK}")

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def check(f: Any) -> Any:
            if isinstance(f, str | os.PathLike):
                # What can't be asked or told is for the save itself to find out.
                with suppress(OSError, ValueError):
                    self._look(Path(os.fsdecode(f)))
            return original(f)

        return check

    def _look(self, path: Path) -> None:
        last, self._last = self._last, path
        if last is not None and last.is_file():
            self._sizes[_kind(last)] = last.stat().st_size
        self._foresee(path)

    def _foresee(self, path: Path) -> None:
        needed = self._sizes.get(_kind(path))
        if needed is None:
            return
        free = room_at(path.parent).free_bytes
        # What it takes the place of is given free first, as torch opens the file anew.
        replaced = path.stat().st_blocks * 512 if path.is_file() else 0
        if free is not None and free + replaced < needed:
            self._tell(
                f"{path} may not fit: the last one like it has {size(needed)}, and"
                f" {size(free + replaced)} is free"
            )
            del self._sizes[_kind(path)]  # told again when another one has shown its size

    def _tell(self, warning: str) -> None:
        self.warnings.append(warning)
        print(f"fasttrain: warning: {warning}", file=sys.stderr, flush=True)  # noqa: T201


def _kind(path: Path) -> str:
    """Return what a checkpoint is called, whatever its step: ``run/step-#/model.pt``."""
    return _NUMBERS.sub("#", str(path))
