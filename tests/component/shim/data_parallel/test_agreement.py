"""Whether a split call gives what the whole one gives."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttrain.shim.data_parallel.split.agreement import (
    DisagreementError,
    call_signature,
    check_equal,
    row_dimensions,
    structure_of,
)
from fasttrain.shim.data_parallel.split.rows import Rows
from fasttrain.shim.hooks.containers import tensors_in

ROWS = Rows(SimpleNamespace(rank=0, world_size=2), 8)  # type: ignore[arg-type]
Pair = namedtuple("Pair", "a b")


@dataclass
class Both:
    first: Tensor
    name: str


def containers(x: Tensor, size: int) -> list[Any]:
    return [
        (x, size), [x, {"a": x, "b": None}], Pair(x, "b"), Both(x, "it"), OrderedDict(loss=x),
        SimpleNamespace(x=x, shape=size), torch.distributions.Normal(x, x.abs() + 1),
    ]  # fmt: skip


@pytest.mark.parametrize("at", range(6))
def test_tensors_are_found_and_left_out_of_the_structure(at: int) -> None:
    one, other = containers(torch.ones(8), 3)[at], containers(torch.zeros(4), 3)[at]
    assert structure_of(one) == structure_of(other)
    assert len(tensors_in(one)) == len(tensors_in(other)) > 0


@pytest.mark.parametrize("at", [0, 5, 6])  # a distribution knows the size of its batch
def test_what_is_no_tensor_must_be_the_same(at: int) -> None:
    one, other = containers(torch.ones(8), 8)[at], containers(torch.ones(4), 4)[at]
    assert structure_of(one) != structure_of(other)


def test_an_unknown_object_is_the_same_only_as_itself() -> None:
    one = object()
    assert structure_of((one,)) == structure_of((one,))
    assert structure_of((one,)) != structure_of((object(),))


def signature(*args: Any, texts: bool = True, **kwargs: Any) -> Any:
    return call_signature(args, kwargs, texts=texts)


def test_kinds_of_calls() -> None:
    x = torch.ones(3, 4)
    assert signature(x, 1) == signature(torch.ones(5, 6), 2), "sizes and numbers change"
    assert signature(x) != signature(x.double())
    assert signature(x, True) != signature(x, False)
    assert signature(x, "a") != signature(x, "b")
    assert signature(x, "a", texts=False) == signature(x, "b", texts=False)
    assert signature(x=x) != signature(y=x)
    hash(signature([x, {"a": object()}]))


def test_what_each_row_has_makes_no_kind_of_call() -> None:
    x = torch.ones(3, 4)
    assert signature({"x": x, "paths": ["a", "b"]}) == signature({"x": x, "paths": ["c", "d"]})
    assert signature(x, [True, False]) == signature(x, [False, False])


def test_optional_tensors_of_a_dataclass_make_kinds_of_calls() -> None:
    x = torch.ones(3, 4)
    assert signature(SimpleNamespace(x=x, mask=x)) == signature(SimpleNamespace(x=x, mask=x))
    assert signature(SimpleNamespace(x=x, mask=x)) != signature(SimpleNamespace(x=x, mask=None))


@pytest.mark.parametrize(
    ("whole", "part", "dim"),
    [((8, 3), (4, 3), 0), ((3, 8), (3, 4), 1), ((5,), (5,), None), ((), (), None),
     ((24, 3), (12, 3), 0), ((2, 8, 1), (2, 4, 1), 1)],
)  # fmt: skip
def test_dimensions_with_rows(whole: Any, part: Any, dim: int | None) -> None:
    assert row_dimensions([torch.zeros(whole)], [torch.zeros(part)], ROWS) == [dim]


@pytest.mark.parametrize(
    ("whole", "part"), [((8, 8), (4, 4)), ((9,), (4,)), ((8,), (5,)), ((8, 1), (8,))]
)
def test_shapes_that_are_no_rows(whole: Any, part: Any) -> None:
    with pytest.raises(DisagreementError):
        row_dimensions([torch.zeros(whole)], [torch.zeros(part)], ROWS)


def test_another_type_is_no_row() -> None:
    with pytest.raises(DisagreementError, match="kind"):
        row_dimensions([torch.zeros(8)], [torch.zeros(4).double()], ROWS)


def test_rounding_is_no_difference() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 300), torch.randn(300, 50)
    check_equal([x @ w], [torch.cat([x[:7] @ w, x[7:] @ w])], "values")
    mean = (x @ w).mean()
    halves = ((x[:32] @ w).sum() + (x[32:] @ w).sum()) / (64 * 50)
    check_equal([(x @ w).pow(2).mean()], [(x @ w).pow(2).sum() / mean.new_tensor(3200)], "values")
    assert halves.isfinite()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(5.0), torch.tensor(5.0 + 4e-4)),  # as a small penalty in a loss would be
        (torch.ones(100), torch.cat([torch.ones(99), torch.tensor([1.01])])),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0])),
        (torch.tensor([1.0, 1.0]), torch.tensor([1.0, float("inf")])),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("-inf")])),
        (torch.tensor([1.0, 1e30]), torch.tensor([1.0, 2e30])),  # no sum of squares in fp32
        (torch.ones(3), None),
    ],
)
def test_differences(one: Tensor, other: Tensor | None) -> None:
    with pytest.raises(DisagreementError):
        check_equal([one], [other], "values")


def test_infinite_numbers_in_the_same_places_are_the_same() -> None:
    x = torch.tensor([1.0, 1e30, float("inf"), float("-inf"), float("nan")])
    check_equal([x], [x.clone()], "values")


def test_a_floor_is_what_may_be_left_of_sums() -> None:
    noise = torch.full((4,), 1e-9)
    with pytest.raises(DisagreementError):
        check_equal([noise], [-noise], "gradients")
    check_equal([noise], [-noise], "gradients", 1e-8)
    check_equal([noise, None], [None, noise], "gradients", 1e-8)
