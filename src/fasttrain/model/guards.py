"""The watches over a run, its restarts, and what happens to it at preemption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasttrain.model.decision import Decision, Source, SourceKind
from fasttrain.model.settings import HangAction, NanChoice, PreemptChoice, RestartOn

ResumeMode = Literal["no", "if-there", "required"]

# What rank 0 reports about snapshots, followed by a step or by nothing.
PREEMPTED_AFTER = "preempted after step"
GOING_ON = "going on from the snapshot of step"
NONE_YET = "there is no snapshot yet; the run starts from the beginning"


@dataclass(frozen=True, slots=True)
class HangWatch:
    """When a run counts as hung, and what happens then.

    Attributes:
        on: Whether the run is watched at all.
        timeout_s: Seconds without progress; None for a limit that follows the time of a step.
        action: Whether a hung run is stopped, or only reported.
    """

    on: bool
    timeout_s: int | None = None
    action: HangAction = "stop"


@dataclass(frozen=True, slots=True)
class Guards:
    """The watches over a training script, one decision each."""

    hang: Decision[HangWatch]
    nan: Decision[NanChoice]


@dataclass(frozen=True, slots=True)
class Restarts:
    """The restarts of a failed run.

    Attributes:
        most: Most restarts.
        on: ``auto``: restart after retryable failures; ``any``: after any failure.
        first_s: Seconds before the first restart.
        cap_s: Most seconds before a restart.
    """

    most: int = 0
    on: RestartOn = "auto"
    first_s: float = 2.0
    cap_s: float = 300.0

    def delay_s(self, barren: int) -> float:
        """Return the seconds before the next restart: exponential backoff up to `cap_s`.

        Args:
            barren: Attempts in a row, the last included, that failed without a training step.
        """
        return min(self.first_s * 2.0 ** min(max(barren - 1, 0), 32), self.cap_s)


@dataclass(frozen=True, slots=True)
class Preempt:
    """What happens at preemption, and the snapshots of a run.

    Attributes:
        mode: ``signal``: the script gets the signal; ``snapshot``: the run ends after a snapshot.
        signals: The signals that preempt a worker; the launcher sends the first.
        every_min: Minutes between snapshots without a signal; None for no such snapshots.
        resume: Whether the run resumes from a snapshot: ``no``; ``if-there``, for a requeued run;
            ``required``, if a person asked for it.
    """

    mode: PreemptChoice = "signal"
    signals: tuple[str, ...] = ("SIGUSR2",)
    every_min: int | None = None
    resume: ResumeMode = "no"


def left_to_the_script() -> Decision[Preempt]:
    """Return the decision for a run that takes no snapshots."""
    source = Source(SourceKind.DEFAULT, "default")
    return Decision(Preempt(), "signals reach the script, which saves what it needs", source)
