"""Sees that all ranks are at the same place of the script, wherever they have to meet.

Ranks run one script on one data, so that they make the same calls in the same order. Where they
don't, after all, the first place at which they differ is told, in the place of a hang or of numbers
that nobody has asked for.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Sequence
from types import CodeType, FrameType

from torch import Tensor

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process.callsite import call_site, own_prefixes
from fasttrain.shim.process.refusal import refuse

_CLOSE = 1e-9  # relative, of squares: what machines of several kinds may round differently


INSIDE = "go on in "  # of what ranks do inside of a call of a model


def meet_inside(ranks: Ranks, tag: int) -> bool:
    """Wait for all ranks inside of a call, and return whether all are doing the same there.

    Raises:
        SystemExit: ``ranks-parted`` where some are outside of it.
    """
    if ranks.meet(tag, lambda: f"{INSIDE}the call of a model at {call_site()}"):
        return True
    if not all(text.startswith(INSIDE) for text in ranks.told):
        refuse(_parted(ranks.told))
    return False


class Parting:
    """Compares places, and numbers that must be the same on all ranks.

    Args:
        ranks: All ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._tags: dict[tuple[CodeType, int, str], int] = {}
        self._others: dict[CodeType, bool] = {}  # whether code is torch's or fasttrain's

    def check(self, doing: str, numbers: Sequence[Tensor] = ()) -> None:
        """Wait for all ranks, and see that they are doing the same.

        Args:
            doing: What this rank is about to do.
            numbers: Numbers on the CPU that are the same on all ranks.

        Raises:
            SystemExit: ``ranks-parted`` when they aren't at one place, ``ranks-data`` when they
                have other numbers there.
        """
        values = [value for number in numbers if math.isfinite(value := float(number))]
        if not self._ranks.meet(self._tag(doing), lambda: f"{doing} at {call_site()}", values):
            refuse(_parted(self._ranks.told))
        if self._ranks.spread > _CLOSE:
            refuse(_other_numbers(doing, call_site()))

    def _tag(self, doing: str) -> int:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and self._is_other(frame.f_code):
            frame = frame.f_back
        if frame is None:
            return 16
        key = (frame.f_code, frame.f_lineno, doing)
        tag = self._tags.get(key)
        if tag is None:
            place = f"{doing} {frame.f_code.co_filename}:{frame.f_lineno}"
            tag = self._tags[key] = 16 + zlib.crc32(place.encode()) % (2**20 - 16)
        return tag

    def _is_other(self, code: CodeType) -> bool:
        found = self._others.get(code)
        if found is None:
            found = self._others[code] = code.co_filename.startswith(own_prefixes())
        return found


def _parted(told: Sequence[str]) -> FasttrainError:
    first = told[0]
    rank = next((rank for rank, text in enumerate(told) if text != first), 0)
    return FasttrainError(
        f"the ranks parted: rank 0 is to {first}, rank {rank} to {told[rank]}",
        why="something in front of these lines was decided by what differs between processes, such"
        " as threads, the process id, or the machine",
        fix="let the decision follow from the data or from a seeded generator, or use one process",
        slug="ranks-parted",
        exit_code=ExitCode.CONTRADICTION,
    )


def _other_numbers(doing: str, where: str) -> FasttrainError:
    return FasttrainError(
        f"the ranks have other numbers where they are to {doing} at {where}",
        why="every rank runs the script on the same data, and what each computes there must be the"
        " same: something was drawn or read that differs between processes",
        fix="seed the generator that the data come from, or use one process",
        slug="ranks-data",
        exit_code=ExitCode.CONTRADICTION,
    )
