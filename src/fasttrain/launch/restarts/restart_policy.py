"""Whether a run that failed is worth another attempt."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.launch.crash.cause_rules import Heals
from fasttrain.launch.crash.causes import HUNG, heals
from fasttrain.model.crash import Crash
from fasttrain.model.decision import Decision, Source
from fasttrain.model.settings import RestartOn

SAME_WAY = "the attempt before failed in the same way"
UNTRAINED = "it failed before the first training step, and would again"


@dataclass(frozen=True, slots=True)
class Failed:
    """What makes a failure the same as another one.

    Attributes:
        cause: Stable name of the cause.
        step: Optimizer steps that the rank had made; None where that can't be seen.
        exit_code: Its exit code, or 128 + signal.
        kind: Class of the exception; empty without one. Messages hold addresses and free memory.
        place: The calls that led there.
    """

    cause: str
    step: int | None = None
    exit_code: int = 1
    kind: str = ""
    place: tuple[tuple[str, int], ...] = ()


def failed_by(crash: Crash) -> Failed:
    """Give what is to be compared of a crash; of a hang, nothing but where training stood."""
    if crash.cause == HUNG:
        return Failed(HUNG, crash.step)
    kind, _, _ = crash.error.partition(":")
    place = tuple((frame.file, frame.line) for frame in crash.frames)
    return Failed(crash.cause, crash.step, crash.exit_code, kind, place)


def can_heal(now: Failed, before: Failed | None, on: RestartOn, source: Source) -> Decision[bool]:
    """Decide whether another attempt can end better.

    Args:
        now: The failure.
        before: The failure of the attempt before; None in the first one.
        on: Whether only what can heal is to be tried again, or anything.
        source: Who said that.
    """
    heal, reason = _judge(now, before, on)
    return Decision(heal, reason, source)


def _judge(now: Failed, before: Failed | None, on: RestartOn) -> tuple[bool, str]:
    how = heals(now.cause)
    if on == "any":
        return True, "whatever failed is tried again"
    if how is Heals.NEVER:
        return False, f"{now.cause}: {how}"
    if how is Heals.ALWAYS:
        return True, how.value
    if now == before and now.step is not None:
        at = f"at step {now.step}" if now.step else "before the first step"
        return False, f"{SAME_WAY} {at}"
    if how is Heals.TRAINED and now.step == 0:
        return False, UNTRAINED
    return True, how.value
