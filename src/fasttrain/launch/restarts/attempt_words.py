"""Attempts in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fasttrain.launch.crash.causes import HUNG
from fasttrain.model.attempts import NODE_CAME, NODE_LEFT, Attempt, Decided
from fasttrain.model.crash import Crash
from fasttrain.model.hang import HANG_FILE, Hang


def told(number: int, decided: Decided, most: int, ranks: int) -> str:
    """Give the line that tells of an attempt behind which the run is started again.

    Args:
        number: Of the attempt, from 1.
        decided: What becomes of the run.
        most: Restarts that were asked for.
        ranks: Ranks of the run.
    """
    after = f"in {decided.delay_s:g} s"
    if decided.reason == NODE_LEFT:
        return f"attempt {number} ended: {NODE_LEFT}; starting again with the others {after}"
    if decided.reason == NODE_CAME:
        return f"attempt {number} ended: {NODE_CAME}; starting again with it"
    crash = decided.crash
    what = f"{_where(crash, ranks)}{crash.cause}: {crash.why}" if crash else decided.reason
    return f"attempt {number} failed: {what}; restart {decided.used} of {most} {after}"


def earlier(attempts: Iterable[Attempt]) -> str:
    """Give what became of attempts, in one line; empty without any."""
    return "; ".join(f"attempt {one.number}: {_brief(one)}" for one in attempts)


def ended_waiting(attempts: Sequence[Attempt]) -> str:
    """Give why a run ended between two attempts."""
    return f"it was asked to end before attempt {len(attempts) + 1} began; {earlier(attempts)}"


def of_a_hang(crash: Crash, hang: Hang) -> Crash:
    """Give the crash of a run whose ranks were killed because none went on."""
    verdict = f": {hang.verdict[0]}" if hang.verdict else ""
    return replace(
        crash,
        cause=HUNG,
        why=f"no rank went on for {hang.quiet_s:.0f} s{verdict}",
        fix=f"look at the stacks in {HANG_FILE}",
        signal="",
        others="",
        step=steps_at(hang),
    )


def steps_at(hang: Hang) -> int:
    """Give the optimizer steps of the rank that was furthest."""
    return max((rank.steps for rank in hang.ranks), default=0)


def _brief(attempt: Attempt) -> str:
    crash = attempt.crash
    if crash is None:
        return attempt.reason
    step = f" at step {crash.step}" if crash.step else ""
    return f"{crash.cause}{step}"


def _where(crash: Crash, ranks: int) -> str:
    on = f" on {crash.node}" if crash.node else ""
    return f"rank {crash.rank}{on}, " if ranks > 1 else ""
