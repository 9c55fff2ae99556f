"""Which rank failed first, and what became of the others."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from fasttrain.launch.crash.cause_rules import Cause, Facts
from fasttrain.launch.crash.evidence import Case
from fasttrain.launch.crash.log_tail import last_lines, recent_traceback
from fasttrain.model.crash import End, Failure

LOST = "lost the connection, a consequence"
WAS_STOPPED, WERE_STOPPED = "was stopped", "were stopped"
SHORTEST_GRACE_NS = 1_000_000_000  # an agent gives its workers more time than this to stop
STOPPING = (-signal.SIGTERM, -signal.SIGKILL)


class Standing(IntEnum):
    """Whether a failure can have been the first: the lowest of them is, then the earliest."""

    OWN = 0
    OF_A_PEER = 1  # it lost or waited for another rank
    STOPPED = 2  # by the agent, because another one had failed


@dataclass(frozen=True, slots=True)
class Fallen:
    """One rank that ended badly, with what is known of its end.

    Attributes:
        end: How it ended.
        failure: What it recorded itself, if it did.
        cause: Why, judged by both.
        standing: Whether it can have been the first.
    """

    end: End
    failure: Failure | None
    cause: Cause
    standing: Standing

    @property
    def time_ns(self) -> int:
        """When it failed, or else when its end was seen, in nanoseconds since the epoch."""
        return self.failure.time_ns if self.failure else self.end.time_ns

    @property
    def order_ns(self) -> int:
        """The same by a clock that no jump of the time of day puts in another order."""
        return self.failure.monotonic_ns if self.failure else self.end.monotonic_ns


def fall(
    end: End, failure: Failure | None, cause: Cause, ends: Sequence[End], *, several: bool
) -> Fallen:
    """Return a rank's fall with its standing among all that ended badly, `ends`."""
    return Fallen(
        end, failure, cause, _standing(end, failure, cause, ends) if several else Standing.OWN
    )


def _standing(end: End, failure: Failure | None, cause: Cause, ends: Sequence[End]) -> Standing:
    """Return whether a failure can have been the first.

    A rank that loses its peer often notices it before that one's end is seen, so what it says
    counts more than when. And one that is stopped, may end by an exit code or an exception of its
    own making; those that stop come behind the first end, whichever it was.
    """
    first_end_ns = min(other.monotonic_ns for other in ends)
    if failure is None:
        # SIGKILL is for those that don't heed SIGTERM; one that comes at once is not the agent's.
        late = end.monotonic_ns - first_end_ns > SHORTEST_GRACE_NS
        killed = end.exit_code == -signal.SIGKILL and late
        stopped = end.exit_code == -signal.SIGTERM or killed
    else:
        bowed_out = failure.raised[0].name in ("SystemExit", "KeyboardInterrupt")
        stopped = bowed_out and failure.monotonic_ns > first_end_ns
    if stopped:
        return Standing.STOPPED
    return Standing.OF_A_PEER if cause.of_a_peer else Standing.OWN


def in_order(fallen: Iterable[Fallen]) -> list[Fallen]:
    """Return those that failed, the first one first."""
    return sorted(fallen, key=lambda one: (one.standing, one.order_ns, one.end.rank))


def told_of_others(first: Fallen, others: Iterable[Fallen]) -> str:
    """Return what became of those that also ended badly, in one sentence; empty without any."""
    stopped: list[int] = []
    consequences: list[int] = []
    parts = []
    for one in others:
        # SIGKILL is what the agent ends those with that don't heed its SIGTERM.
        if one.standing is Standing.STOPPED:
            stopped.append(one.end.rank)
        elif one.standing is Standing.OF_A_PEER:
            consequences.append(one.end.rank)
        else:
            later_s = (one.order_ns - first.order_ns) / 1e9
            parts.append(failed_later(one.end.rank, later_s, one.cause.slug))
    if consequences:
        parts.append(f"{_ranks(consequences)} {LOST}")
    if stopped:
        parts.append(f"{_ranks(stopped)} {WERE_STOPPED if len(stopped) > 1 else WAS_STOPPED}")
    return "; ".join(parts)


def failed_later(rank: int, later_s: float, slug: str) -> str:
    """Return what is told of a rank that failed by itself, after the first one."""
    return f"rank {rank} failed {later_s:.3g} s later: {slug}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"{len(ranks)} other ranks"


# Ranks that failed first, and were stopped while they still cleaned up behind that.


@dataclass(frozen=True, slots=True)
class Judged:
    """One rank that ended badly, and what was made of it.

    Attributes:
        fallen: Its end and its standing.
        case: What is known of it.
        facts: What fills the words of its cause.
    """

    fallen: Fallen
    case: Case
    facts: Facts


def slow_ends(first: Judged, others: Iterable[Judged]) -> frozenset[int]:
    """Return the ranks that were stopped, and whose log shows that they had failed before.

    One that catches its error, leaves the process group and takes its time to end has its peers
    fail first. It records nothing when the agent stops it; its log may hold the traceback. One
    that its peer's log holds as well is of something that both of them survived.
    """
    return frozenset(
        one.fallen.end.rank
        for one in others
        if one.fallen.standing is Standing.STOPPED and one.fallen.failure is None
        if (said := recent_traceback(one.case.log))
        and f"{said.kinds[0]}: {said.message}".rstrip(": ") not in first.case.log
    )


def told_of_the_others(first: Judged, others: Sequence[Judged]) -> str:
    """Return what became of the others; where none failed by itself, with the last word of one.

    The rank that went away is then among those that were stopped, and nothing tells which it was.
    """
    told = told_of_others(first.fallen, [one.fallen for one in others])
    if first.fallen.standing is not Standing.OF_A_PEER:
        return told
    stopped = (one for one in others if one.fallen.standing is Standing.STOPPED)
    last = ((one.fallen.end.rank, "".join(last_lines(one.case.log, 1))) for one in stopped)
    said = (
        f"; the log of rank {rank} ends with: {line}"
        for rank, line in last
        if line and line not in first.case.log
    )
    return told + next(said, "")
