"""Results that are rounded at random: by how much, where, and with whose random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.prove.rounded import RandomRounding, Rounding

LOW, ORDER = 2.0**-8, 2.0**-18


@pytest.fixture
def roots() -> Iterator[RootCalls]:
    with ExitStack() as undo:
        found = RootCalls()
        found.install(undo)
        yield found


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("by", [LOW, ORDER])
def test_a_result_is_rounded_by_no_more_than_that(by: float) -> None:
    torch.manual_seed(0)
    x = torch.rand(40, 50) + 1
    with RandomRounding(by, 1):
        found = x + 1
    errors = (found / (x + 1) - 1).abs()
    assert float(errors.max()) <= by + 2**-22  # and what fp32 itself rounds
    assert float(errors.mean()) == pytest.approx(by / 2, rel=0.2)


def test_errors_are_others_each_time_and_with_each_seed() -> None:
    x = torch.rand(200)
    with RandomRounding(LOW, 1):
        one, other = x * 2, x * 2
    with RandomRounding(LOW, 1):
        again = x * 2
    with RandomRounding(LOW, 2):
        of_others = x * 2
    assert not torch.equal(one, other)
    assert torch.equal(one, again)
    assert not torch.equal(one, of_others)


def test_what_is_stored_random_or_no_number_stays() -> None:
    torch.manual_seed(0)
    expected = torch.rand(10)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with RandomRounding(LOW, 1):
        drawn = torch.rand(10)
        counted = torch.arange(10) * 3
        viewed = drawn.view(2, 5).t()
        kept = drawn.clone()
        kept.mul_(2.0)
    assert torch.equal(drawn, expected)
    assert torch.equal(torch.get_rng_state(), state), "nothing of the script's was drawn"
    assert torch.equal(counted, torch.arange(10) * 3)
    assert torch.equal(viewed, expected.view(2, 5).t())


def test_large_results_and_those_of_other_layouts() -> None:
    x = torch.ones(3, 4, 5, 6).to(memory_format=torch.channels_last)
    large = torch.ones((1 << 20) + 17)
    with RandomRounding(LOW, 1):
        found, many, empty, one = x * 1.0, large * 1.0, torch.ones(0) * 2.0, torch.tensor(2.0) * 2.0
    assert found.stride() == x.stride()
    for result in (found, many):
        assert float((result - 1).abs().mean()) == pytest.approx(LOW / 2, rel=0.3)
    assert empty.numel() == 0
    assert float(one) != 4.0


def test_what_autocast_computes_in_fp32_is_not_rounded_in_low_precision() -> None:
    x = torch.rand(8, 16)
    with RandomRounding(LOW, 1):
        low, softmax = nn.functional.mse_loss(x, x * 0), torch.softmax(x, -1)
    with RandomRounding(ORDER, 1):
        order = nn.functional.mse_loss(x, x * 0)
    right = nn.functional.mse_loss(x, x * 0)
    assert torch.equal(low, right)
    assert not torch.equal(order, right)
    assert not torch.equal(softmax, torch.softmax(x, -1)), "on a CPU it is in bf16"


def test_arguments_of_a_product_are_rounded_in_low_precision() -> None:
    x = torch.tensor([[1.0, -1.0] * 50])
    weight = torch.ones(100, 1)  # so that the sum is 0, whose own rounding is none
    with RandomRounding(LOW, 1):
        assert 0 < abs(float(x @ weight)) < 100 * LOW
    with RandomRounding(ORDER, 1):
        assert float(x @ weight) == 0
    assert torch.equal(weight, torch.ones(100, 1))


def test_models_and_their_backward_passes_are_rounded_once_it_is_due(roots: RootCalls) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(16, 8)

    def results() -> list[torch.Tensor]:
        net.zero_grad()
        outside = x * 2.0
        output = net(x)
        output.square().mean().backward()
        return [outside, output.detach(), *(p.grad.clone() for p in net.parameters())]  # type: ignore[union-attr]

    plain, due = results(), [False]
    with ExitStack() as undo:
        Rounding(RandomRounding(LOW, 1), lambda: due[0]).install(roots, undo)
        before = results()
        due[0] = True
        after = results()
    again = results()
    assert all(torch.equal(a, b) for a, b in zip(plain, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)), "it is taken out"
    assert torch.equal(after[0], plain[0]), "outside of a model nothing is rounded"
    for one, other in zip(after[1:], plain[1:], strict=True):
        assert LOW / 20 < relative(one, other) < 10 * LOW


def test_a_weight_is_rounded_to_the_same_side_each_time(roots: RootCalls) -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(64, 1, bias=False), torch.randn(1, 64)
    torch.nn.init.ones_(net.weight)
    mode = RandomRounding(LOW, 1)
    mode._round = lambda _: None  # type: ignore[method-assign]
    outputs: list[Any] = []
    with ExitStack() as undo:
        Rounding(mode, lambda: True).install(roots, undo)
        outputs += [net(x).detach() for _ in range(2)]
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], net(x).detach())
    assert torch.equal(net.weight, torch.ones(1, 64)), "the weight itself stays"


def test_memory_that_was_a_weights_may_be_of_another_size_later() -> None:
    mode, weight = RandomRounding(LOW, 1), torch.ones(16, 1)
    mode._weights[weight.untyped_storage().data_ptr()] = torch.ones(1)  # of one that is gone
    with mode:
        found = torch.ones(1, 16) @ weight
    assert float(found) == pytest.approx(16.0, rel=4 * LOW)
