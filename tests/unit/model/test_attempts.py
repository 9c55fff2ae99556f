"""What the nodes of a run come to, when an attempt failed."""

from __future__ import annotations

from itertools import permutations

from fasttrain.model.attempts import NODE_LEFT, Verdict, agree, used_up
from fasttrain.model.crash import Crash


def verdict(
    host: str, *, again: bool = True, failed_ns: int = 0, of_a_peer: bool = False
) -> Verdict:
    crash = Crash(3, 4, 7, "", failed_ns, host, "", "") if failed_ns else None
    return Verdict(host, again, f"of {host}", 2.0 if failed_ns else 0.0, crash, of_a_peer)


PEER = verdict("a", failed_ns=10, of_a_peer=True)
FIRST = verdict("b", failed_ns=20)
LATER = verdict("c", failed_ns=30)
WELL = verdict("d")
HOPELESS = verdict("e", again=False, failed_ns=40)


def test_a_rank_that_lost_another_is_not_the_first_to_fail() -> None:
    for order in permutations((PEER, FIRST, LATER, WELL)):
        decided = agree(order, used=1, most=3)
        assert (decided.again, decided.used, decided.reason) == (True, 2, "of b")
        assert decided.crash is not None
        assert (decided.crash.cause, decided.crash.node) == ("b", "b")
        assert decided.delay_s == 2.0


def test_one_node_that_can_not_heal_is_enough() -> None:
    for order in permutations((FIRST, WELL, HOPELESS)):
        decided = agree(order, used=0, most=3)
        assert (decided.again, decided.reason, decided.used) == (False, "of e", 0)
        assert decided.crash is not None
        assert decided.crash.cause == "b"  # it failed first all the same


def test_restarts_are_used_up() -> None:
    decided = agree([FIRST], used=3, most=3)
    assert (decided.again, decided.reason) == (False, used_up(3))
    assert agree([FIRST], used=2, most=3).again


def test_a_node_that_is_gone_ends_a_run_that_needs_it() -> None:
    decided = agree([PEER], used=0, most=3, lost=1)
    assert (decided.again, decided.crash is not None) == (False, True)


def test_an_elastic_run_goes_on_without_a_node_and_uses_no_restart() -> None:
    decided = agree([PEER, WELL], used=3, most=3, lost=1, elastic=True)
    assert (decided.again, decided.reason, decided.used) == (True, NODE_LEFT, 3)


def test_an_elastic_run_uses_a_restart_for_a_failure_of_its_own() -> None:
    assert agree([FIRST, PEER], used=1, most=3, lost=1, elastic=True).used == 2
    assert not agree([FIRST], used=3, most=3, lost=1, elastic=True).again
