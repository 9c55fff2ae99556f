"""The turns of several ranks: all take them, and rank 0 reports when all have."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fasttrain.model.codec import dumps, loads
from fasttrain.model.proof import Took, Turn
from fasttrain.shim.process import turns as module
from fasttrain.shim.process.turns import LeadingTurns, Turns


class Ranks:
    """Rank 0, two others, and who gives them turns."""

    def __init__(self) -> None:
        self.giver, given = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(2)]
        self.first = LeadingTurns(given.detach(), [ours.detach() for ours, _ in pairs])
        self.others = [Turns(theirs.detach()) for _, theirs in pairs]
        self.giver.settimeout(20)

    def begin(self, turn: Turn) -> list[Turn]:
        """Send a turn, and return what each rank gets."""
        self.giver.sendall(dumps(turn, indent=None).encode() + b"\n")
        return [rank.wait() for rank in (self.first, *self.others)]

    def heard(self) -> Took:
        return loads(Took, self.giver.recv(1 << 16))

    def close(self) -> None:
        self.giver.close()
        for end in (self.first._descriptor, *(it.fileno() for it in self.first._others)):
            os.close(end)
        for other in self.others:
            os.close(other._descriptor)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    found = Ranks()
    yield found
    found.close()


def test_a_turn_is_over_when_all_ranks_have_taken_it(ranks: Ranks) -> None:
    assert ranks.begin(Turn(2, untimed=1)) == [Turn(2, untimed=1)] * 3
    with ThreadPoolExecutor(1) as pool:
        reported = pool.submit(ranks.first.report, Took(2, losses=(1.0, 0.1), wall_s=(7.0,)))
        ranks.others[1].report(Took(2, losses=(2.0, 0.1), wall_s=(8.0,)))
        ranks.giver.setblocking(False)
        with pytest.raises(BlockingIOError):
            ranks.giver.recv(1)
        assert not reported.done()
        ranks.others[0].report(Took(2, losses=(6.0, 0.1), wall_s=(9.0,)))
        reported.result(20)
    took = ranks.heard()
    assert took.losses == (3.0, 0.1), "the mean, which is the number itself if all have the same"
    assert (took.wall_s, took.ended, took.parted) == ((7.0,), False, "")
    over = Turn(0, over=True)
    assert ranks.begin(over) == [over] * 3


def test_a_loss_that_is_not_finite_on_one_rank_is_not_finite(ranks: Ranks) -> None:
    ranks.others[0].report(Took(1, losses=(None,)))
    ranks.others[1].report(Took(1, losses=(1.0,)))
    ranks.first.report(Took(1, losses=(1.0,)))
    assert ranks.heard().losses == (None,)


def test_ranks_that_end_together_have_not_parted(ranks: Ranks) -> None:
    for other in ranks.others:
        other.report(Took(9, losses=(1.0,), ended=True))
    ranks.first.report(Took(9, losses=(1.0,), ended=True))
    took = ranks.heard()
    assert (took.ended, took.parted) == (True, "")


@pytest.mark.parametrize("silent", [False, True], ids=["reports it", "leaves by os._exit"])
def test_a_rank_that_ends_before_the_others(ranks: Ranks, silent: bool) -> None:
    if silent:
        os.close(ranks.others[0]._descriptor)
        ranks.others[0]._descriptor = os.open(os.devnull, os.O_RDONLY)
    else:
        ranks.others[0].report(Took(4, losses=(1.0,), ended=True))
    ranks.others[1].report(Took(6, losses=(1.0, 2.0, 3.0)))
    ranks.first.report(Took(6, losses=(1.0, 2.0, 3.0)))
    took = ranks.heard()
    steps = 0 if silent else 4
    assert took.parted == f"rank 1 ended after {steps} steps, and rank 0 went on after 6"
    assert took.ended
    assert took.losses == (1.0, 2.0, 3.0)


def test_a_rank_that_waits_for_rank_0_is_not_waited_for_when_it_has_ended(ranks: Ranks) -> None:
    ranks.first.report(Took(4, losses=(1.0,), ended=True))
    took = ranks.heard()
    assert (took.ended, took.losses) == (True, (1.0,))
