"""Guesses about the dimension of the batch."""

from __future__ import annotations

import pytest
import torch

from fasttrain.shim.data_parallel.split.candidates import (
    MOST_GUESSES,
    candidates,
    cut_alike,
    has_few_rows,
    list_entries,
    row_count,
)


def of(*shapes: tuple[int, ...], ranks: int = 2) -> list[tuple[int | None, ...]]:
    return candidates([torch.zeros(shape) for shape in shapes], ranks)


def test_the_first_dimension_is_guessed_first() -> None:
    assert of((8, 3), (8,))[0] == (0, 0)


def test_the_second_one_comes_after() -> None:
    assert (1, 1) in of((5, 8, 3), (2, 8, 4))
    assert (1, 0) in of((5, 8, 3), (8,)), "with the lengths of each sequence"


def test_a_tensor_that_happens_to_have_as_many_rows_may_be_left_out() -> None:
    found = of((8, 3), (8, 8))
    assert found[0] == (0, 0)
    assert (0, None) in found


def test_numbers_are_never_split() -> None:
    assert of((8, 3), ())[0] == (0, None)
    assert of((), ()) == []


def test_fewer_rows_than_ranks_are_not_split() -> None:
    assert of((1, 1)) == []
    assert of((2, 1), ranks=3) == []
    assert of((3, 1), ranks=3) == [(0,)]


@pytest.mark.parametrize(
    ("shapes", "few"),
    [
        ([(1, 3)], True),
        ([(2, 3), (2,)], True),
        ([(3, 3)], False),
        ([(1, 8, 4), (5, 8, 2)], False),  # states of a recurrent layer
        ([(), (8, 2)], False),
        ([()], False),
    ],
)
def test_what_can_only_be_a_batch_of_few_rows(shapes: list[tuple[int, ...]], few: bool) -> None:
    assert has_few_rows([torch.zeros(shape) for shape in shapes], 3) == few


def test_guesses_are_few_and_different() -> None:
    found = of(*[(8, 8)] * 9)
    assert len(found) == len(set(found)) == MOST_GUESSES


def test_rows_are_those_of_all_that_is_split() -> None:
    x, y = torch.zeros(8, 3), torch.zeros(8)
    assert row_count([x, y], (0, 0)) == 8
    assert row_count([x, y], (1, None)) == 3
    assert row_count([x, y], (1, 0)) == 0, "they don't agree"
    assert row_count([x, y], (0, 1)) == 0, "there is no such dimension"
    assert row_count([x, y], (None, None)) == 0


def test_entries_of_a_list_are_cut_alike_or_not_at_all() -> None:
    images = [torch.zeros(3, size, 8) for size in (8, 9)]
    targets = [{"boxes": torch.zeros(count, 4), "id": torch.tensor(0)} for count in (2, 3)]
    for samples in (targets, tuple(targets)):
        entries = list_entries((images,), {"targets": samples})
        assert cut_alike((0, 0, None, None, None, None), entries)
        assert cut_alike((None, None, 0, None, 0, None), entries)
        assert not cut_alike((None, None, 0, None, None, None), entries)
        assert not cut_alike((1, None, None, None, None, None), entries)


def test_what_stands_beside_a_list_is_cut_as_it_may_be() -> None:
    entries = list_entries(([torch.zeros(4, 2), torch.zeros(4)], torch.zeros(4)), {})
    assert cut_alike((0, None, None), entries)
