"""What a snapshot holds can be read without running anything that is in it."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fasttrain.shim.snapshots.files import NeedsPickleError, packed, unpacked

Pair = namedtuple("Pair", "left right")


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(packed(value), file)
    file.seek(0)
    return unpacked(torch.load(file, weights_only=True))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "x", True, None, 1 << 80],
        ({"a": [(), {}]}, -1),
        {1: {2: 3}, None: 4},
        Counter({3: 1, 5: 2}),
        OrderedDict(b=1, a=2),
        {"seen": {1, 2}},
        frozenset({"x"}),
        torch.Size([2, 3]),
        torch.device("cuda", 1),
        b"\x00\xff",
        b"",
        np.float64(0.1),
        np.int32(7),
    ],
    ids=repr,
)
def test_it_is_read_as_it_was(value: Any) -> None:
    again = through_a_file(value)
    assert again == value
    assert type(again) is type(value)


def test_states_of_numpy() -> None:
    name, words, *rest = np.random.RandomState(3).get_state()
    again = through_a_file((name, words, *rest))
    assert again[0] == name
    assert again[1].dtype == words.dtype
    assert (again[1] == words).all()
    assert again[2:] == tuple(rest)
    table = through_a_file(np.arange(6.0).reshape(2, 3))
    assert table.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    table += 1  # is its own


def test_tensors_without_what_they_are_cut_from() -> None:
    whole = torch.arange(1000.0)
    packed_one = packed({"cut": whole[10:20]})["cut"]
    assert packed_one.untyped_storage().nbytes() == 10 * 4
    assert torch.equal(packed_one, whole[10:20])
    assert packed(whole).data_ptr() == whole.data_ptr()
    weight = through_a_file([nn.Parameter(torch.ones(2))])[0]
    assert type(weight) is torch.Tensor
    assert not weight.requires_grad


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"state": [1, Path()]}, "it.state.1"),
        ({"f": print}, "it.f"),
        ({"pair": Pair(1, 2)}, "it.pair"),
        ({Path("x"): 1}, "a key of it"),
        ({"a": {"fasttrain: kind": "set"}}, "a key of it.a"),
        (np.array([print]), "it"),
        ({"dtype": {torch.float32}}, "it.dtype.0"),
    ],
)
def test_what_would_have_to_be_pickled_is_refused(value: Any, where: str) -> None:
    with pytest.raises(NeedsPickleError) as caught:
        packed(value, "it")
    assert caught.value.where == where
