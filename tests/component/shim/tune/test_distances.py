"""Small parts of large results count: rows, parameters with small gradients, common factors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fasttrain.shim.tune.distances import Comparison, Distance, Results, other_bits, same_bits

ROUNDOFF = 2.0**-8
EXACT = torch.randn(5000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rounded(tensor: Tensor, seed: int) -> Tensor:
    errors = torch.empty_like(tensor)
    errors.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
    return tensor * (1 + ROUNDOFF * errors)


def worst(group: str, exact: dict[str, Tensor], changed: dict[str, Tensor | None]) -> Distance:
    samples = [
        Results({group: {name: rounded(tensor, seed) for name, tensor in exact.items()}})
        for seed in (1, 2)
    ]
    changes, reference = Results({group: changed}), Results({group: exact})
    return Comparison(changes, reference, samples, ROUNDOFF).distances()[0]


def without_a_row(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:-1], tensor[-1:] * 0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (without_a_row, "a row of output 0"),
        (lambda x: without_a_row(x.T).T, "a row of output 0"),
        (lambda x: x * 1.005, "a common factor of output 0"),
        (lambda x: x.flip(1), "output 0"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[Tensor], Tensor], what: str) -> None:
    found = worst("output", {"0": EXACT}, {"0": change(rounded(EXACT, 3))})
    assert found.share > 1
    assert what in found.what


@pytest.mark.parametrize("seed", range(3, 13))
def test_rounding_is_within_what_rounding_explains(seed: int) -> None:
    assert worst("output", {"0": EXACT}, {"0": rounded(EXACT, seed)}).share < 0.7


@pytest.mark.parametrize("missing", [True, False])
def test_a_small_gradient_that_is_left_out_is_seen(missing: bool) -> None:
    exact = {"large": EXACT, "small": EXACT[:10] * 1e-4}
    nothing = None if missing else torch.zeros(10, 4, dtype=torch.float64)
    found = worst("gradient of", exact, {"large": rounded(EXACT, 3), "small": nothing})
    assert found.share == math.inf
    assert "small, which is left out" in found.what


def test_what_is_zero_but_for_rounding_may_be_zero() -> None:
    exact = {"large": EXACT, "nothing": EXACT[:10] * 1e-17}
    changed = {"large": rounded(EXACT, 3), "nothing": EXACT[:10] * 0}
    assert worst("gradient of", exact, changed).share < 1


def test_counters_are_compared_as_they_are() -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    results = [Results({"buffer": {"steps": value}}) for value in (one, two)]
    same, other = (Comparison(r, results[0], [results[0]], ROUNDOFF) for r in results)
    assert same.distances()[0].share == 0
    assert other.distances()[0].share == math.inf


def test_bits() -> None:
    nan = torch.tensor([math.nan, 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([math.nan, -0.0]))
    assert not same_bits(nan, nan.double())
    assert not same_bits(nan, None)
    assert same_bits(torch.ones(()), torch.ones(()))
    assert other_bits(Results({"a": {}}), Results({"a": {"b": nan}})) == "a b"
