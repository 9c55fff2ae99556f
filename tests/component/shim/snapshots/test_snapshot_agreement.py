"""Ranks that hear a signal in different steps take one snapshot, whatever their order."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.shim.snapshots.writer import Agreement


class Store(dict[str, bytes]):
    """What a store of torch's does, in one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def agreements(count: int) -> list[Agreement]:
    store: Any = Store()
    store.get = store.__getitem__
    return [
        Agreement(SimpleNamespace(rank=rank, world_size=count, store=store))  # type: ignore[arg-type]
        for rank in range(count)
    ]


def run(heard: tuple[int, ...], ends: tuple[bool, ...], order: tuple[int, ...]) -> list[Any]:
    """Return the step in which each rank takes its snapshot, and whether it ends.

    Every step is begun by all ranks before one of them ends it, as with averaged gradients.
    """
    ranks = agreements(len(heard))
    taken: dict[int, tuple[int, bool]] = {}
    for step in range(1, 12):
        for rank in order:
            wants = step >= heard[rank] and rank not in taken
            if wants and ranks[rank].due(step, ends=ends[rank]):
                taken[rank] = (step, ranks[rank].ends)
    return [taken[rank] for rank in range(len(heard))]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("heard", [(3, 3, 3), (3, 4, 3), (2, 6, 4), (9, 1, 1)])
def test_all_take_it_one_step_behind_the_last(
    heard: tuple[int, ...], order: tuple[int, ...]
) -> None:
    taken = run(heard, (True, True, True), order)
    assert taken == [(max(heard) + 1, True)] * 3


def test_one_that_is_to_end_ends_all() -> None:
    assert run((3, 4), (False, True), (0, 1)) == [(5, True)] * 2
    assert run((3, 4), (False, False), (1, 0)) == [(5, False)] * 2


def test_one_process_agrees_with_itself() -> None:
    alone = Agreement(None)
    assert alone.due(4, ends=True)
    assert alone.ends
    assert alone.gather("x") == ["x"]
    assert alone.finish("full") == "full"
    assert alone.due(5, ends=False)
    assert not alone.ends
