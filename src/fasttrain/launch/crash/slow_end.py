"""Ranks that failed first, and were stopped while they still cleaned up behind that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fasttrain.launch.crash.cause_facts import Facts
from fasttrain.launch.crash.evidence import Case
from fasttrain.launch.crash.first_failure import Fallen, Standing, told_of_others
from fasttrain.launch.crash.log_tail import last_lines, recent_traceback


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
    """Give the ranks that were stopped, and whose log shows that they had failed before.

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
    """Give what became of the others; where none failed by itself, with the last word of one.

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
