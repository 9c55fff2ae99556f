"""Decides when to compile a model that trains eagerly, from times that were measured.

Compiling costs something at once and pays step by step. Whoever knows how long the run lasts
compares both. Whoever doesn't rents before they buy: the run trains eagerly until the cost is a
small part of what it has taken already, so that a compilation that never pays costs at most that
part. With the cost c, the share s = 1 / `UNKNOWN_TIMES` and the ratio r of a compiled step to a
plain one, a run of unknown length takes at most 1 + s times as long as one that never compiles, and
at most (1 + s) / (r + s) times as long as one that compiles at its first step: it is longest
against the latter if it ends when it has just compiled, after c / s.

Where the length is known and the ratio isn't, a compilation that gains nothing costs at most
1 / `KNOWN_TIMES` of the run.

Where both are known, the ratio is that of an earlier run, and so is the cost. The gain is counted
as if the ratio were larger by `MARGIN`: a run that stays eager takes at most 1 / (1 - `MARGIN`)
times as long as one that compiles, and one that compiles loses nothing before it is off by more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UNKNOWN_TIMES = 20.0  # a run of unknown length has taken so many times the cost before
KNOWN_TIMES = 10.0  # a run of known length takes so many times the cost in all
MARGIN = 0.04  # by which a ratio of times may be off that an earlier run has measured
# What a step that is compiled takes of one that isn't, where nothing is known: an assumption.
ASSUMED_RATIO = 0.85
# The import of dynamo and inductor, and what each part of a model takes to trace, and to compile:
# rough, from two models of 6 and 14 parts, which compiled for 19 and 28 s and stalled a run for 3.8
# and 3.9 s (torch 2.13, a 2-core CPU with a load of 2 to 3).
IMPORT_S = 2.0
TRACE_S_PER_PART = 0.1
COMPILE_S = 12.0
COMPILE_S_PER_PART = 0.7

Verdict = Literal["begin", "wait", "never"]


@dataclass(frozen=True, slots=True)
class Prospect:
    """What is known when it is to be decided; times in seconds.

    Attributes:
        step_s: Time of a plain step.
        elapsed_s: What the training has taken so far.
        steps_left: Steps until the end of the run; None if nobody knows.
        at_least_left: Steps that surely come.
        cost_s: What the compilation will cost.
        ratio: Time of a compiled step over that of a plain one; None if it isn't known.
    """

    step_s: float
    elapsed_s: float
    steps_left: int | None
    at_least_left: int
    cost_s: float
    ratio: float | None = None

    @property
    def left(self) -> int:
        """Steps that come, as far as is known."""
        return self.at_least_left if self.steps_left is None else self.steps_left

    @property
    def known_s(self) -> float:
        """What is known of the time of the whole run, without compilation."""
        return self.elapsed_s + self.left * self.step_s


@dataclass(frozen=True, slots=True)
class Choice:
    """What is decided, and why in one sentence."""

    verdict: Verdict
    why: str


def decide(seen: Prospect) -> Choice:
    """Return whether to compile now, later or never."""
    left, left_s = seen.left, seen.left * seen.step_s
    ratio = ASSUMED_RATIO if seen.ratio is None else seen.ratio + MARGIN
    gain_s = left_s * (1.0 - ratio)
    long_enough = seen.ratio is not None or seen.known_s >= KNOWN_TIMES * seen.cost_s
    least = "" if seen.steps_left is not None else "at least "
    figures = (
        f"{least}{left:,} steps ({left_s:.0f} s) are left,"
        f" compiling costs about {seen.cost_s:.1f} s and"
        f" {'saves at least' if seen.ratio is not None else 'may save'} {max(gain_s, 0.0):.1f} s"
    )
    if gain_s > seen.cost_s and long_enough:
        return Choice("begin", figures)
    if seen.steps_left is not None:
        return Choice("never", f"it would not pay: {figures}")
    if seen.ratio is not None and seen.ratio >= 1.0:
        return Choice("never", "it would not pay: steps were not faster compiled in an earlier run")
    if seen.elapsed_s >= UNKNOWN_TIMES * seen.cost_s:
        return Choice(
            "begin",
            f"{seen.elapsed_s:.0f} s were trained, {UNKNOWN_TIMES:.0f} times the"
            f" {seen.cost_s:.1f} s that compiling costs; how long the run lasts isn't known",
        )
    return Choice(
        "wait",
        f"compiling costs about {seen.cost_s:.0f} s, and begins after"
        f" {UNKNOWN_TIMES * seen.cost_s:.0f} s of training where the length of a run isn't known",
    )


def guess_stall(parts: int) -> float:
    """Return the seconds for which a switch to compiled steps will stall the run.

    Args:
        parts: Number of modules that have none inside.
    """
    return IMPORT_S + TRACE_S_PER_PART * parts


def guess_compilation(parts: int) -> float:
    """Return the seconds that one core will compile for, of a model of so many parts."""
    return COMPILE_S + COMPILE_S_PER_PART * parts
