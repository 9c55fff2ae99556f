"""Fused steps are as torch's own kernels would make them, or torch's own kernels make them.

torch's fused kernels for a CPU check little: some walk through memory in the parameter's order
whatever the order of the gradient, and SGD's computes wrong numbers for 16-bit parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fasttrain.model.outcome import Outcome, State
from fasttrain.shim.levers.optimizer import (
    GRADIENT_OTHERWISE,
    HOOKED,
    LATE_GRADIENT,
    NOT_DENSE,
    STATE_OTHERWISE,
    WRONG_NUMBERS,
)

Train = Callable[[], list[Tensor]]


def both(rig: Any, train: Train) -> tuple[list[Tensor], list[Tensor], Outcome]:
    """Return what a loop gives as it is, what it gives with the lever on, and what was told."""
    plain = train()
    with rig(optimizer="fused") as runtime:
        fused = train()
        return plain, fused, runtime.outcomes()["optimizer"]


def assert_equal(some: list[Tensor], others: list[Tensor], **tolerances: float) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, **tolerances)


def gradients(*shape: int, steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for _ in range(steps)]


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: Adam(p, lr=0.1, eps=1e-4),
        lambda p: AdamW(p, lr=0.1, eps=1e-4),
        lambda p: Adagrad(p, lr=0.1, eps=1e-4),
    ],
)
def test_parameters_of_each_precision(rig: Any, make: Any, dtype: torch.dtype) -> None:
    def train() -> list[Tensor]:
        p = nn.Parameter(weights(37).to(dtype))  # two vectors of 16 numbers and a remainder
        optimizer = make([p])
        for gradient in gradients(37):
            p.grad = gradient.to(dtype)
            optimizer.step()
        return [p.detach().float()]

    plain, fused, outcome = both(rig, train)
    short = dtype.itemsize == 2
    precision = {"rtol": 0.02, "atol": 0.02} if short else {"rtol": 1e-5, "atol": 1e-6}
    assert_equal(plain, fused, **precision)
    wrong = short and isinstance(make([nn.Parameter(weights(1))]), SGD)
    assert outcome.state is (State.SKIPPED if wrong else State.APPLIED)
    assert not wrong or f"{WRONG_NUMBERS} for {str(dtype)[6:]} " in outcome.reason


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.1}])
def test_a_first_gradient_that_comes_later(
    rig: Any, options: dict[str, Any], with_closure: bool
) -> None:
    """As in branches, mixtures of experts, layers that are unfrozen."""

    def train() -> list[Tensor]:
        early, late, never = (nn.Parameter(weights(8) + n) for n in range(3))
        optimizer = SGD([early, late, never], lr=0.1, momentum=0.9, **options)
        for number in range(4):

            def closure(late_too: bool = number > 1) -> None:
                optimizer.zero_grad()
                (early.square().sum() + late_too * late.pow(3).sum()).backward()
                if not late_too:
                    late.grad = None

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        buffers = [optimizer.state[p]["momentum_buffer"] for p in (early, late)]
        return [early.detach(), late.detach(), never.detach(), *buffers]

    plain, fused, outcome = both(rig, train)
    assert_equal(plain, fused)
    assert outcome.state is State.APPLIED
    assert outcome.counts["steps"] == 3  # of 4: two before the late gradient and one after it
    assert any(LATE_GRADIENT in note for note in outcome.notes)


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_that_replace_gradients_before_a_step(rig: Any, of_all: bool) -> None:
    """As preconditioners do, whose results lie in another order in memory."""

    def train() -> list[Tensor]:
        p = nn.Parameter(weights(6, 4))
        optimizer = Adam([p], lr=0.1)

        def precondition(*_: Any) -> None:
            assert p.grad is not None
            assert optimizer.param_groups[0]["fused"] is None
            p.grad = p.grad.t().contiguous().t()

        register = register_optimizer_step_pre_hook if of_all else optimizer.register_step_pre_hook
        hook = register(precondition)
        for gradient in gradients(6, 4):
            p.grad = gradient
            optimizer.step()
        hook.remove()
        p.grad = gradients(6, 4)[0]
        optimizer.step()
        return [p.detach()]

    plain, fused, outcome = both(rig, train)
    assert_equal(plain, fused)
    assert outcome.state is State.APPLIED
    assert outcome.counts["steps"] == 1
    assert any(HOOKED in note for note in outcome.notes)


def test_only_the_group_of_the_late_gradient_is_left_to_torch(rig: Any) -> None:
    with rig(optimizer="fused") as runtime:
        early, late, other = (nn.Parameter(weights(4)) for _ in range(3))
        groups = [{"params": [early, late]}, {"params": [other]}]
        optimizer = SGD(groups, lr=0.1, momentum=0.9)
        for number in range(2):
            for p in (early, other) if number == 0 else (early, late, other):
                p.grad = torch.ones(4)
            optimizer.step()
        assert runtime.outcomes()["optimizer"].counts["steps"] == 2
        assert [group["fused"] for group in optimizer.param_groups] == [None, None]


def transposed(tensor: Tensor) -> Tensor:
    """Return an equal tensor whose memory is in the other order."""
    return tensor.t().contiguous().t()


KINDS = [
    lambda p: SGD(p, lr=0.1, momentum=0.9),
    lambda p: Adam(p, lr=0.1),
    lambda p: AdamW(p, lr=0.1),
    lambda p: Adagrad(p, lr=0.1),
]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    ("parameter", "gradient", "reason"),
    [
        (lambda w: w, transposed, GRADIENT_OTHERWISE),
        (transposed, lambda g: g, GRADIENT_OTHERWISE),
        (lambda w: w.repeat(1, 2)[:, ::2], lambda g: g, NOT_DENSE),
    ],
)
def test_gradients_and_parameters_in_another_order(
    rig: Any, make: Any, parameter: Any, gradient: Any, reason: str
) -> None:
    def train() -> list[Tensor]:
        p = nn.Parameter(parameter(weights(4, 6)))
        optimizer = make([p])
        for one in gradients(4, 6):
            p.grad = gradient(one)
            optimizer.step()
        return [p.detach()]

    plain, fused, outcome = both(rig, train)
    assert_equal(plain, fused)
    assert outcome.state is State.SKIPPED
    assert reason in outcome.reason


@pytest.mark.parametrize("make", KINDS)
def test_state_in_another_order(rig: Any, make: Any) -> None:
    """Of a checkpoint, or of a model that is moved to channels_last between two steps."""

    def train() -> list[Tensor]:
        p, moved = nn.Parameter(weights(4, 6)), nn.Parameter(weights(4, 6))
        optimizer, other = make([p]), make([moved])
        for number, one in enumerate(gradients(4, 6)):
            if number == 1:
                saved = optimizer.state_dict()
                for key, value in saved["state"][0].items():
                    if value is not None and value.dim() == 2:
                        saved["state"][0][key] = transposed(value)
                optimizer.load_state_dict(saved)
                moved.data = transposed(moved.data)
            p.grad, moved.grad = one, transposed(one) if number else one.clone()
            optimizer.step()
            other.step()
        return [p.detach(), moved.detach()]

    plain, fused, outcome = both(rig, train)
    assert_equal(plain, fused)
    assert outcome.counts["steps"] == 2  # the first of each
    assert any(STATE_OTHERWISE in note for note in outcome.notes)


def test_dimensions_of_one_element_have_no_order(rig: Any) -> None:
    """As of the weights of 1x1 convolutions, whose gradients may come in channels_last."""

    def train() -> list[Tensor]:
        p = nn.Parameter(weights(4, 3, 1, 1))
        optimizer = AdamW([p], lr=0.1)
        for one in gradients(4, 3, 1, 1):
            p.grad = one.as_strided(one.shape, (3, 1, 3, 3))
            optimizer.step()
        return [p.detach()]

    plain, fused, outcome = both(rig, train)
    assert_equal(plain, fused)
    assert outcome.counts["steps"] == 3


def test_parameters_that_become_16_bit_later(rig: Any) -> None:
    def weights() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(4):
            if step == 2:
                model.bfloat16()
                for state in sgd.state.values():
                    state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
            sgd.zero_grad()
            model(torch.ones(8, 64, dtype=model.weight.dtype)).square().mean().backward()
            sgd.step()
        return model.weight.detach()

    expected = weights()
    with rig(optimizer="fused"):
        found = weights()
    assert torch.equal(found, expected)
