"""Decides whether a run that failed is worth another attempt."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.launch.crash.cause_rules import Retry
from fasttrain.launch.crash.causes import HUNG, retry_of
from fasttrain.model.crash import Crash
from fasttrain.model.decision import Decision, Source
from fasttrain.model.settings import RestartOn

SAME_WAY = "the attempt before failed in the same way"
UNTRAINED = "it failed before the first training step, and would again"


@dataclass(frozen=True, slots=True)
class FailureKey:
    """What two failures must have in common to count as the same.

    Attributes:
        cause: Stable name of the cause.
        step: Optimizer steps that the rank had made; None where that can't be seen.
        exit_code: Its exit code, or 128 + signal.
        kind: Class of the exception; empty without one. Its message does not count, because
            messages hold addresses and amounts of free memory.
        place: The calls that led there.
    """

    cause: str
    step: int | None = None
    exit_code: int = 1
    kind: str = ""
    place: tuple[tuple[str, int], ...] = ()


def key_of(crash: Crash) -> FailureKey:
    """Return what is compared of a crash; of a hang, only the cause and the training step."""
    if crash.cause == HUNG:
        return FailureKey(HUNG, crash.step)
    kind, _, _ = crash.error.partition(":")
    place = tuple((frame.file, frame.line) for frame in crash.frames)
    return FailureKey(crash.cause, crash.step, crash.exit_code, kind, place)


def retryable(
    now: FailureKey, before: FailureKey | None, on: RestartOn, source: Source
) -> Decision[bool]:
    """Decide whether another attempt can end better.

    Args:
        now: The failure.
        before: The failure of the attempt before; None in the first one.
        on: Whether only what is retryable is to be tried again, or anything.
        source: Who set that.
    """
    value, reason = _decide(now, before, on)
    return Decision(value, reason, source)


def _decide(now: FailureKey, before: FailureKey | None, on: RestartOn) -> tuple[bool, str]:
    retry = retry_of(now.cause)
    if on == "any":
        return True, "whatever failed is tried again"
    if retry is Retry.NEVER:
        return False, f"{now.cause}: {retry}"
    if retry is Retry.ALWAYS:
        return True, retry.value
    if now == before and now.step is not None:
        at = f"at step {now.step}" if now.step else "before the first step"
        return False, f"{SAME_WAY} {at}"
    if retry is Retry.TRAINED and now.step == 0:
        return False, UNTRAINED
    return True, retry.value
