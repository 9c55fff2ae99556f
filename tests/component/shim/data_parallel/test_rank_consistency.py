"""A rank whose device waits for one that has ended, on devices that are behind their host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from fasttrain.shim.data_parallel.rank_consistency import WAIT_S, RankConsistency
from fasttrain.shim.process import refusal, true_clock
from support.run_ahead import RunAhead, running_ahead


class EndedError(Exception):
    """Raised in the place of the process's end."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunAhead]:
    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(refusal, "ended_by_us", lambda error: None)
    with running_ahead() as host:
        yield host


@pytest.fixture
def of_rank_0(host: RunAhead) -> Any:
    """Return rank 0 of two, after three steps whose work takes its device a minute."""
    ranks: Any = SimpleNamespace(
        rank=0, world_size=2, joined=True, on_join=[], waiting_since_s=0.0, store=dist.HashStore()
    )
    consistency = RankConsistency(ranks)
    optimizer: Any = SimpleNamespace(
        param_groups=[{"params": [SimpleNamespace(device=torch.device("cuda", 0))]}]
    )
    for step in range(1, 4):
        host.work(20.0)
        consistency.after_step(step, optimizer, sharded=True)
    return consistency


def look(consistency: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it look once for the ends of others."""
    looks = iter([False, True])
    monkeypatch.setattr(consistency, "_closed", SimpleNamespace(wait=lambda _: next(looks)))
    consistency._watch()


@pytest.mark.parametrize(
    ("ended_after", "later_s", "ends"),
    [
        ("2", WAIT_S + 1, True),
        ("2", WAIT_S - 1, False),  # not long enough
        ("2", 61.0, False),  # its device has done all of it
        ("3", WAIT_S + 1, False),  # made the same steps: this rank ends as well
        ("4", WAIT_S + 1, False),
        ("", WAIT_S + 1, False),  # is still there
    ],
)
def test_a_device_that_waits_for_a_rank_with_fewer_steps(
    of_rank_0: Any, host: RunAhead, monkeypatch: Any, ended_after: str, later_s: float, ends: bool
) -> None:
    if ended_after:
        of_rank_0._ranks.store.set("ended/1", ended_after)
    host.now_s += later_s
    if ends:
        with pytest.raises(EndedError):
            look(of_rank_0, monkeypatch)
    else:
        look(of_rank_0, monkeypatch)


def test_a_host_that_waits_needs_no_device(of_rank_0: Any, monkeypatch: Any) -> None:
    of_rank_0._ranks.store.set("ended/1", "3")
    of_rank_0._ranks.waiting_since_s = 1e-9
    monkeypatch.setattr(true_clock, "monotonic", lambda: WAIT_S + 1)
    with pytest.raises(EndedError):
        look(of_rank_0, monkeypatch)


def test_it_looks_from_when_the_ranks_have_joined(of_rank_0: Any, monkeypatch: Any) -> None:
    looked: list[bool] = []
    monkeypatch.setattr(of_rank_0._watcher, "_target", lambda: looked.append(True))
    with ExitStack() as undo:
        of_rank_0.install(undo)
        assert looked == []
        for listen in of_rank_0._ranks.on_join:
            listen()
        of_rank_0._watcher.join(10)
    assert looked == [True]
