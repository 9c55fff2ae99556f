"""What ``--compile auto`` has found in a run, and what earlier runs of the same script found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasttrain.model.tuning import TunedFor

COMPILE_AUTO_FILE = "compile_auto.json"  # in the run directory
HISTORY_FILE = "history.json"  # in the folder of runs

Phase = Literal["watching", "eager", "compiling", "comparing", "kept", "dropped"]


@dataclass(frozen=True, slots=True)
class Switched:
    """What a worker under ``--compile auto`` has done; times in seconds, 0 if unknown.

    Attributes:
        phase: What it does, or has decided.
        reason: Why, in one sentence.
        from_step: The step from which on it ran compiled.
        plain_step_s: Median time of a step that isn't compiled.
        compiled_step_s: The same times the ratio of a compiled step to a plain one.
        background_s: How long the compilation in the background took.
        slowed_s: What the steps during it took longer together.
        stall_s: What the steps at the switch took longer together.
        cached: Whether all graphs were found in the caches at the switch.
        cache: The folder of these caches if they were, and it is known.
        undecided: Whether the comparison ended before the faster side was known.
    """

    phase: Phase
    reason: str = ""
    from_step: int = 0
    plain_step_s: float = 0.0
    compiled_step_s: float = 0.0
    background_s: float = 0.0
    slowed_s: float = 0.0
    stall_s: float = 0.0
    cached: bool = False
    undecided: bool = False
    cache: str = ""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What is known from earlier runs of a script with the same arguments; 0 where it isn't.

    Attributes:
        date: Of the latest one.
        steps: Steps of the latest one that ended by itself.
        plain_step_s: Median time of a step that isn't compiled.
        compiled_step_s: Median time of a compiled step.
        background_s: How long a compilation in the background took.
        slowed_s: What the steps during it took longer together.
        stall_s: What a switch to compiled steps stalled the run.
        compile_s: How long the latest run with ``--compile default`` compiled: little with a warm
            cache.
        cache: The folder in which the latest ``--compile auto`` that switched found all graphs.
        dropped: Why the latest ``--compile auto`` dropped compilation; empty if it didn't.
        levers: The other levers of the runs that the times and `dropped` are of.
    """

    date: str
    steps: int = 0
    plain_step_s: float = 0.0
    compiled_step_s: float = 0.0
    background_s: float = 0.0
    slowed_s: float = 0.0
    stall_s: float = 0.0
    compile_s: float = 0.0
    dropped: str = ""
    levers: tuple[str, ...] = ()
    cache: str = ""

    @property
    def ratio(self) -> float | None:
        """Time of a compiled step over that of a plain one; None if it isn't known."""
        if self.plain_step_s and self.compiled_step_s:
            return self.compiled_step_s / self.plain_step_s
        return None


@dataclass(frozen=True, slots=True)
class KnownRun:
    """What is known about runs of one script.

    Attributes:
        of: What it holds for.
        known: What is known.
    """

    of: TunedFor
    known: Earlier


@dataclass(frozen=True, slots=True)
class History:
    """The known runs of a folder, the latest last."""

    runs: tuple[KnownRun, ...] = ()
