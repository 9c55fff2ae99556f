"""Nodes that show no sign of life in the store of their rendezvous."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed as dist

from fasttrain.agent import restart_agent
from fasttrain.agent.restart_agent import (
    AWAY_S,
    BEAT_S,
    SHORTEST_SILENCE_S,
    SILENT_S,
    Nodes,
    silence_s,
)


class Clock:
    """Stands in for the module `time`."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(restart_agent, "time", clock)
    return clock


@pytest.fixture
def nodes(clock: Clock) -> list[Nodes]:
    """Return three nodes at one store, which look after each other."""
    store = dist.HashStore()
    groups: list[Any] = [
        SimpleNamespace(group_world_size=3, group_rank=rank, store=store) for rank in range(3)
    ]
    return [Nodes(group, silent_s=10.0) for group in groups]


def look(clock: Clock, seconds: float, *looking: Nodes) -> list[bool]:
    """Have nodes look twice a second for so long; return what each saw at last."""
    found: list[bool] = []
    for _ in range(int(seconds / BEAT_S)):
        clock.now_s += BEAT_S
        found = [node.failed(0) for node in looking]
    return found


def test_nodes_that_live_are_not_silent(clock: Clock, nodes: list[Nodes]) -> None:
    assert look(clock, 60, *nodes) == [False] * 3


@pytest.mark.parametrize("dead", range(3))
def test_a_dead_one_is_missed_by_the_one_before(
    clock: Clock, nodes: list[Nodes], dead: int
) -> None:
    look(clock, 5, *nodes)
    living = [node for node in nodes if node is not nodes[dead]]
    assert look(clock, 9, *living) == [False, False]
    assert [nodes[dead - 1]] == [
        node for node, missed in zip(living, look(clock, 3, *living), strict=True) if missed
    ]


def test_one_that_never_began_is_missed(clock: Clock, nodes: list[Nodes]) -> None:
    assert look(clock, 11, *nodes[:2]) == [False, True]


def test_an_agent_that_was_away_misses_nobody_at_once(clock: Clock, nodes: list[Nodes]) -> None:
    look(clock, 5, *nodes)
    clock.now_s += 60.0  # it was suspended, and so were the others
    assert not nodes[0].failed(0)
    assert AWAY_S > BEAT_S


def test_a_node_that_ended_well_is_not_missed(clock: Clock, nodes: list[Nodes]) -> None:
    look(clock, 5, *nodes)
    nodes[1].ended_well(0)
    assert look(clock, 60, nodes[0], nodes[2]) == [False, False]


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ("", SILENT_S),
        ("last_call_timeout=3", SILENT_S),
        ("keep_alive_interval=5", 15.0),
        ("last_call_timeout=3, keep_alive_interval=10 ,keep_alive_max_attempt=4", 40.0),
        ("keep_alive_interval=0", SHORTEST_SILENCE_S),
        ("keep_alive_interval=-1", SHORTEST_SILENCE_S),
        ("keep_alive_interval=soon", SILENT_S),
    ],
)
def test_the_rendezvous_says_how_long(settings: str, seconds: float) -> None:
    assert silence_s(settings) == seconds
