"""What is watched in a run, and what becomes of it when it fails or has to make room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasttrain.model.decision import Decision, Source, SourceKind
from fasttrain.model.settings import HangAction, NanChoice, PreemptChoice, RestartOn

ResumeMode = Literal["no", "if-there", "required"]

# What rank 0 tells of snapshots, each followed by a step or by nothing.
PREEMPTED_AFTER = "preempted after step"
GOING_ON = "going on from the snapshot of step"
NONE_YET = "there is no snapshot yet; the run starts from the beginning"


@dataclass(frozen=True, slots=True)
class HangWatch:
    """When a run counts as hung, and what then.

    Attributes:
        on: Whether it is watched at all.
        timeout_s: Seconds without progress; None for a limit that follows the time of a step.
        action: Whether it is stopped, or told and left.
    """

    on: bool
    timeout_s: int | None = None
    action: HangAction = "stop"


@dataclass(frozen=True, slots=True)
class Guards:
    """What is watched while the script trains, one decision each."""

    hang: Decision[HangWatch]
    nan: Decision[NanChoice]


@dataclass(frozen=True, slots=True)
class Restarts:
    """What becomes of a run that failed.

    Attributes:
        most: How often it is started again.
        on: Whether only after recoverable failures, or after any.
        first_s: Seconds before a restart.
        cap_s: Most seconds before a restart.
    """

    most: int = 0
    on: RestartOn = "auto"
    first_s: float = 2.0
    cap_s: float = 300.0

    def delay_s(self, barren: int) -> float:
        """Return the seconds before the next restart.

        Args:
            barren: Attempts in a row, the last included, that failed without a training step.
        """
        return min(self.first_s * 2.0 ** min(max(barren - 1, 0), 32), self.cap_s)


@dataclass(frozen=True, slots=True)
class Preempt:
    """What becomes of a run that has to make room for another one.

    Attributes:
        mode: ``signal``: the script gets the signal; ``snapshot``: the run ends behind a snapshot.
        signals: The signals that ask a worker for it; the launcher sends the first.
        every_min: Minutes between snapshots without a signal; None takes none.
        resume: Whether the run goes on from a snapshot: ``no``; ``if-there``, as a run that was
            queued again; ``required``, as a person has asked for.
    """

    mode: PreemptChoice = "signal"
    signals: tuple[str, ...] = ("SIGUSR2",)
    every_min: int | None = None
    resume: ResumeMode = "no"


def left_to_the_script() -> Decision[Preempt]:
    """Return the decision for a run that takes no snapshots."""
    source = Source(SourceKind.DEFAULT, "default")
    return Decision(Preempt(), "signals reach the script, which saves what it needs", source)
