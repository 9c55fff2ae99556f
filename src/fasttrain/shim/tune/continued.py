"""Lets the next start of a script go on where the last one ended, before all was compared.

What is compared next follows from what was found before. So the next start goes through the same
comparisons: those that are over return what they had found, without a step, and the one that the
end of the script broke off goes on with the pairs that it has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fasttrain.files import load, write_private
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.tuning import (
    TUNING_STATE_FILE,
    Compared,
    Timed,
    TuningReport,
    TuningState,
)
from fasttrain.statistics.paired import PairedClocks

SAVING = 0.02  # of the time; often, since a script may end without a word, by os._exit
Levers = frozenset[str]
_NOTHING = TuningState(TuningReport("running", 0, 0.0))


class Continued:
    """The comparisons of all starts of a script.

    Args:
        earlier: Run directory of the start before; empty at the first one.
        run_dir: Run directory of this one.
        alpha: Of the pairs of each comparison.

    Attributes:
        earlier: The result of the starts before.
        begun: What the comparison that was broken off has found; None of any other one.
        spent_s: Seconds that it took.
    """

    def __init__(self, earlier: str, run_dir: Path, alpha: float) -> None:
        state = _read(earlier)
        self.earlier = state.report
        self.begun: Compared | None = None
        self.spent_s = 0.0
        self._alpha = alpha
        self._path = run_dir / TUNING_STATE_FILE
        self._to_come: Iterator[Compared] = iter(state.found)
        self._left = len(state.found)
        self._broken_off = (state.begun, state.spent_s)
        self._found: list[Compared] = []
        self._pairs: dict[tuple[Levers, Levers], PairedClocks] = {
            (frozenset(timed.base), frozenset(timed.changed)): _pairs(timed, alpha)
            for timed in state.timed
        }
        self._began_s = self._saved_s = self._save_s = 0.0
        self._ours: Compared | None = None

    @property
    def replaying(self) -> bool:
        """Whether comparisons that an earlier start made are still to come."""
        return self._left > 0

    def compared(self) -> Compared | None:
        """Return what the next comparison has found in an earlier start; None if it is to be made.

        One that is to be made has begun with this call.
        """
        found = next(self._to_come, None)
        if found is not None:
            self._left -= 1
            self._found.append(found)
            return found
        (self.begun, self.spent_s), self._broken_off = self._broken_off, (None, 0.0)
        self._ours, self._began_s = self.begun, time.perf_counter()
        return None

    def pairs(self, base: Levers, changed: Levers) -> PairedClocks:
        """Return the pairs of two sides so far, to which more are added."""
        return self._pairs.setdefault((base, changed), PairedClocks(self._alpha))

    def timed(self, base: Levers, changed: Levers) -> bool:
        """Whether two sides were compared before."""
        return (base, changed) in self._pairs

    def add(self, found: Compared) -> None:
        """Add what the comparison that has begun has found."""
        self._found.append(found)
        self.begun = self._ours = None

    def begin(self, found: Compared) -> None:
        """Keep what the comparison that has begun has found so far."""
        self._ours = found

    def save(self, report: TuningReport) -> None:
        """Write what the next start needs, to the result so far."""
        now_s = time.perf_counter()
        timed = tuple(_timed(*sides, pairs) for sides, pairs in self._pairs.items())
        spent_s = self.spent_s + now_s - self._began_s if self._ours is not None else 0.0
        state = TuningState(report, tuple(self._found), timed, self._ours, spent_s)
        write_private(self._path, dumps(state), durable=False)
        self._saved_s = time.perf_counter()
        self._save_s = self._saved_s - now_s

    def save_now_and_then(self, report: TuningReport) -> None:
        """Write it if that takes `SAVING` of the time since the last time."""
        if self._save_s <= SAVING * (time.perf_counter() - self._saved_s):
            self.save(report)


def _read(run_dir: str) -> TuningState:
    if run_dir:
        with suppress(OSError, CodecError):  # then everything is compared from the beginning
            return load(TuningState, Path(run_dir, TUNING_STATE_FILE))
    return _NOTHING


def _timed(base: Levers, changed: Levers, pairs: PairedClocks) -> Timed:
    sides = tuple(sorted(base)), tuple(sorted(changed))
    return Timed(*sides, pairs.wall.ratios, pairs.processor.ratios)


def _pairs(timed: Timed, alpha: float) -> PairedClocks:
    pairs = PairedClocks(alpha)
    pairs.wall.add_ratios(timed.wall)
    pairs.processor.add_ratios(timed.processor)
    return pairs
