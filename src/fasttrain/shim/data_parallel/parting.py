"""Checks that all ranks are at the same line of the script wherever they communicate.

All ranks run one script on the same data, so that they make the same calls in the same order. If
they don't, the error names the first place at which they differ; without it the run would hang or
compute wrong numbers.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType

from torch import Tensor

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process.callsite import call_site, own_prefixes
from fasttrain.shim.process.refusal import refuse

_CLOSE = 1e-9  # relative, of squares: different kinds of machines may round differently
INSIDE = "go on in "  # prefix of what ranks do inside a call of a model


def meet_inside(ranks: Ranks, tag: int) -> bool:
    """Wait for all ranks inside a call; return True if all are doing the same there.

    Raises:
        SystemExit: ``ranks-parted`` if some are outside of it.
    """
    if ranks.meet(tag, lambda: f"{INSIDE}the call of a model at {call_site()}"):
        return True
    if not all(text.startswith(INSIDE) for text in ranks.reports):
        refuse(_of_reports(ranks.reports))
    return False


class Parting:
    """Compares the ranks' lines in the script, and numbers that must be equal on all ranks.

    Args:
        ranks: All ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._tags: dict[tuple[CodeType, int, str], int] = {}
        self._others: dict[CodeType, bool] = {}  # True for code of torch and fasttrain

    def check(self, doing: str, numbers: Sequence[Tensor] = ()) -> None:
        """Wait for all ranks, and check that they are doing the same.

        Args:
            doing: What this rank is about to do.
            numbers: Scalars on the CPU that must be equal on all ranks.

        Raises:
            SystemExit: ``ranks-parted`` if they are at different lines, ``ranks-data`` if their
                numbers differ.
        """
        values = [value for number in numbers if math.isfinite(value := float(number))]
        if not self._ranks.meet(self._tag(doing), lambda: f"{doing} at {call_site()}", values):
            refuse(_of_reports(self._ranks.reports))
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


def _of_reports(reports: Sequence[str]) -> FasttrainError:
    rank = next((rank for rank, text in enumerate(reports) if text != reports[0]), 1)
    return ranks_parted({0: reports[0], rank: reports[rank]})


def ranks_parted(doing: Mapping[int, str]) -> FasttrainError:
    """Return the error for two ranks at different places; ``doing`` is what each is to do."""
    (one, first), (two, second) = sorted(doing.items())
    return FasttrainError(
        f"the ranks parted: rank {one} is to {first}, rank {two} to {second}",
        why="a decision before these lines depends on something that differs between processes,"
        " such as threads, the process id or the machine",
        fix="base the decision on the data or on a seeded generator, or use one process",
        slug="ranks-parted",
        exit_code=ExitCode.CONTRADICTION,
    )


def _other_numbers(doing: str, where: str) -> FasttrainError:
    return FasttrainError(
        f"the ranks have different numbers where they are to {doing} at {where}",
        why="every rank runs the script on the same data and must compute the same numbers there:"
        " the script drew or read something that differs between processes",
        fix="seed the generator that makes the data, or use one process",
        slug="ranks-data",
        exit_code=ExitCode.CONTRADICTION,
    )
