"""Every sample of a batch goes to one rank, in order, and no rank gets many more than another."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fasttrain.shim.shares import Share, bounds, cut_data, cut_indices, deal_batches

Pair = namedtuple("Pair", ["x", "y"])
worlds = st.integers(1, 9)


@given(st.integers(0, 200), worlds)
def test_bounds_follow_each_other(size: int, world_size: int) -> None:
    parts = [bounds(size, rank, world_size) for rank in range(world_size)]
    assert [i for first, end in parts for i in range(first, end)] == list(range(size))
    sizes = [end - first for first, end in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.lists(st.integers(), min_size=1, max_size=40), worlds)
def test_indices_are_each_cut_once(batch: list[int], world_size: int) -> None:
    parts = [cut_indices(batch, rank, world_size) for rank in range(world_size)]
    assert [i for mine, share in parts if share.count for i in mine] == batch
    assert all(len(mine) == max(share.count, 1) for mine, share in parts)
    assert {share.total for _, share in parts} == {len(batch)}
    assert all(mine == batch[:1] for mine, share in parts if not share.count)


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=5), max_size=20), worlds)
def test_whole_batches_are_each_dealt_once(batches: list[list[int]], world_size: int) -> None:
    hands = [list(deal_batches(iter(batches), rank, world_size)) for rank in range(world_size)]
    assert len({len(hand) for hand in hands}) == 1, "every rank makes the same steps"
    dealt = [mine for turn in zip(*hands, strict=True) for mine, share in turn if share.count]
    assert dealt == batches
    for turn in zip(*hands, strict=True):
        assert {share.total for _, share in turn} == {sum(share.count for _, share in turn)}


def nested(size: int) -> Any:
    return {
        "x": torch.arange(size * 2).reshape(size, 2),
        "pair": Pair(torch.arange(size), [f"name {i}" for i in range(size)]),
        "more": [torch.arange(size), (torch.arange(size), None)],
    }


@given(st.integers(1, 20), worlds)
def test_containers_are_cut_alike_in_all_their_parts(size: int, world_size: int) -> None:
    found = [cut_data(nested(size), rank, world_size) for rank in range(world_size)]
    parts = [each[0] for each in found if each is not None and each[1].count]
    whole = nested(size)
    assert torch.equal(torch.cat([part["x"] for part in parts]), whole["x"])
    assert torch.equal(torch.cat([part["pair"].x for part in parts]), whole["pair"].x)
    assert [name for part in parts for name in part["pair"].y] == whole["pair"].y
    assert torch.equal(torch.cat([part["more"][1][0] for part in parts]), whole["more"][1][0])


def test_containers_keep_their_types_and_the_batch_its_own_parts() -> None:
    data = OrderedDict(pair=Pair(torch.arange(4), torch.arange(4)), kept=None)
    found = cut_data(data, 0, 2)
    assert found is not None
    assert (type(found[0]), type(found[0]["pair"]), found[0]["kept"]) == (OrderedDict, Pair, None)
    assert len(data["pair"].x) == 4, "what the loader keeps was changed"


def test_a_rank_for_which_none_is_left_gets_one_that_counts_nothing() -> None:
    found = cut_data(torch.arange(2), 2, 3)
    assert found is not None
    assert (found[0].tolist(), found[1]) == ([0], Share(0, 2))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param((torch.ones(4), torch.ones(5)), id="two sizes"),
        pytest.param((torch.ones(4), torch.tensor(1.0)), id="one number beside the samples"),
        pytest.param(torch.tensor(1.0), id="one number"),
        pytest.param((torch.ones(4), 7), id="a plain number beside the samples"),
        pytest.param("text", id="a string"),
        pytest.param(None, id="nothing"),
        pytest.param([], id="an empty list"),
        pytest.param(object(), id="an object that can't be cut"),
        pytest.param((torch.ones(4), ["a", "b"]), id="fewer names than samples"),
    ],
)
def test_what_can_not_be_cut_stays_whole(data: Any) -> None:
    assert cut_data(data, 0, 2) is None


def test_a_batch_of_views_is_cut_without_a_copy() -> None:
    data: Tensor = torch.arange(8)
    found = cut_data(data, 1, 2)
    assert found is not None
    assert found[0].data_ptr() == data[4:].data_ptr()
