"""Which of several ranks failed first, from their records and the agent's."""

from __future__ import annotations

import pytest

from fasttrain.launch.crash.cause_rules import Cause, Facts, Retry
from fasttrain.launch.crash.evidence import Evidence
from fasttrain.launch.crash.judge import (
    LOST,
    WAS_STOPPED,
    WERE_STOPPED,
    Judged,
    failed_later,
    in_order,
    standing,
    told_of_others,
)
from fasttrain.model.crash import Failure, Raised, WorkerExit

OWN = Cause("own", Retry.ONCE, lambda _: Facts(), "", "")
PEER = Cause("peer", Retry.ALWAYS, lambda _: Facts(), "", "", of_a_peer=True)
MS = 1_000_000


class Rank:
    """How one rank failed: recorded at `raised`, if at all, and seen at `seen`, in milliseconds.

    The time of day goes backwards meanwhile, and nothing may depend on it.
    """

    def __init__(
        self, seen: int, code: int = 1, *, raised: int | None = None, cause: Cause = OWN,
        kind: str = "builtins.ValueError",
    ) -> None:  # fmt: skip
        self.seen, self.code, self.raised, self.cause, self.kind = seen, code, raised, cause, kind


def order(*ranks: Rank) -> tuple[list[int], str]:
    ends = [
        WorkerExit(rank, 100 + rank, one.code, -one.seen * MS, one.seen * MS)
        for rank, one in enumerate(ranks)
    ]
    failures = [
        None if one.raised is None
        else Failure(
            rank, 100 + rank, -one.raised * MS, one.raised * MS, 1, (Raised((one.kind,), ""),)
        )
        for rank, one in enumerate(ranks)
    ]  # fmt: skip
    gathered = [
        Evidence(end.exit_code, exit=end, failure=failure)
        for end, failure in zip(ends, failures, strict=True)
    ]
    judged = in_order(
        Judged(evidence, one.cause, Facts(), standing(evidence, one.cause, gathered))
        for evidence, one in zip(gathered, ranks, strict=True)
    )
    return [one.evidence.rank for one in judged], told_of_others(judged[0], judged[1:])


@pytest.mark.parametrize(
    ("ranks", "expected", "told"),
    [
        ((Rank(900, raised=12), Rank(300, raised=13)), [0, 1], failed_later(1, 0.001, "own")),
        ((Rank(50, -9), Rank(60, -15)), [0, 1], f"rank 1 {WAS_STOPPED}"),
        ((Rank(60, -15), Rank(50, 3)), [1, 0], f"rank 0 {WAS_STOPPED}"),
        # It noticed the death before the agent did.
        (
            (Rank(80, raised=40, cause=PEER), Rank(50, -9)), [1, 0],
            f"rank 0 {LOST}",
        ),
        # A handler of SIGTERM that leaves by sys.exit is no failure of its own.
        (
            (Rank(90, 5, raised=80, kind="builtins.SystemExit"), Rank(50, raised=40, cause=PEER)),
            [1, 0], f"rank 0 {WAS_STOPPED}",
        ),
        (
            (Rank(30, 5, raised=20, kind="builtins.SystemExit"), Rank(50, -9)), [0, 1],
            failed_later(1, 0.03, "own"),
        ),
        # What didn't heed SIGTERM was killed.
        ((Rank(30_050, -9), Rank(50, raised=40)), [1, 0], f"rank 0 {WAS_STOPPED}"),
        (
            (Rank(50, raised=40), Rank(60, -15), Rank(61, -15), Rank(62, -15)), [0, 1, 2, 3],
            f"3 other ranks {WERE_STOPPED}",
        ),
        (
            (Rank(50, raised=40), Rank(60, raised=45, cause=PEER), Rank(61, -15)), [0, 1, 2],
            f"rank 1 {LOST}; rank 2 {WAS_STOPPED}",
        ),
    ],
)  # fmt: skip
def test_order(ranks: tuple[Rank, ...], expected: list[int], told: str) -> None:
    assert order(*ranks) == (expected, told)
