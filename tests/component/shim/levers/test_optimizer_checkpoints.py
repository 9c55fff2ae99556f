"""Checkpoints and copies of a fused optimizer are those that the script alone would make."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.model.outcome import State


@pytest.fixture
def fused(rig: Any) -> Iterator[Any]:
    with rig(optimizer="fused") as runtime:
        yield lambda: runtime.outcomes()["optimizer"]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape or (3,)))


def step(optimizer: Any, gradient: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, gradient)
    optimizer.step()


FUSIBLE: list[Callable[..., Any]] = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, maximize=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
]


def checkpoint(make: Callable[..., Any], steps: int) -> tuple[Any, Any]:
    """Return the parameter and state of an optimizer after some steps."""
    p = parameter()
    optimizer = make([p])
    for number in range(steps):
        step(optimizer, number + 1.0)
    return p.detach(), optimizer.state_dict()


def assert_same(found: Any, expected: Any) -> None:
    """Compare state dicts: keys and kinds exactly, floating values to rounding."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.device) == (expected.dtype, expected.device)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    else:
        assert found == expected


@pytest.mark.parametrize("make", FUSIBLE)
def test_weights_and_checkpoints_are_the_scripts_own(rig: Any, make: Any) -> None:
    weights, state = checkpoint(make, 4)
    with rig(optimizer="fused") as runtime:
        fused_weights, fused_state = checkpoint(make, 4)
        outcome = runtime.outcomes()["optimizer"]
    assert (outcome.state, outcome.counts) == (State.APPLIED, {"steps": 4})
    assert_same(fused_weights, weights)
    assert_same(fused_state, state)


@pytest.mark.parametrize("make", FUSIBLE)
@pytest.mark.parametrize("first_is_fused", [True, False])
def test_checkpoints_interchange(rig: Any, make: Any, first_is_fused: bool) -> None:
    def run(*, resumed_by_other: bool) -> Any:
        p = parameter()
        optimizer = make([p])
        with rig(optimizer="fused" if first_is_fused else "keep"):
            step(optimizer)
            state, weights = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
            if not resumed_by_other:
                step(optimizer, 2.0)
                return p.detach()
        with rig(optimizer="keep" if first_is_fused else "fused"):
            p = nn.Parameter(weights)
            optimizer = make([p])
            optimizer.load_state_dict(state)
            step(optimizer, 2.0)
            return p.detach()

    torch.testing.assert_close(run(resumed_by_other=True), run(resumed_by_other=False))


def test_loading_a_checkpoint_that_chose_for_itself(fused: Any) -> None:
    optimizer, other = (torch.optim.SGD([parameter()], lr=0.1) for _ in range(2))
    step(optimizer)
    step(other)
    state = optimizer.state_dict()
    state["param_groups"][0]["foreach"] = True
    other.load_state_dict(state)
    step(other)
    assert other.state_dict()["param_groups"][0]["foreach"] is True
    assert fused().counts == {"steps": 2}


@pytest.mark.parametrize("beside", [{"epoch": 1}, 3])
def test_what_a_script_keeps_in_the_state_beside_its_parameters(fused: Any, beside: Any) -> None:
    optimizer, resumed = (torch.optim.AdamW([parameter()], lr=0.1) for _ in range(2))
    optimizer.state["progress"] = beside
    step(optimizer)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(resumed)
    assert resumed.state["progress"] == beside
    assert fused().counts == {"steps": 2}


def test_double_precision_counts_its_steps_in_double(fused: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        p = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([p], lr=0.1)
        step(optimizer)
        state = optimizer.state_dict()["state"][0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert (state["step"].dtype, state["step"].item()) == (torch.float64, 1.0)
    assert fused().state is State.APPLIED


@pytest.mark.parametrize(
    "renew",
    [
        copy.deepcopy,
        lambda o: pickle.loads(pickle.dumps(o)),
        lambda o: torch.load(_saved(o), weights_only=False),
    ],
)
def test_copies_go_on_as_the_original(fused: Any, renew: Any) -> None:
    p = parameter()
    optimizer = torch.optim.AdamW([p], lr=0.1)
    step(optimizer)
    other = renew(optimizer)
    assert other.param_groups[0]["fused"] is None
    step(other, 2.0)
    step(optimizer, 2.0)
    assert torch.equal(other.param_groups[0]["params"][0], p)
    assert fused().counts == {"steps": 3}


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_step_that_fails_leaves_nothing_in_a_checkpoint(fused: Any) -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    step(optimizer)

    def closure() -> float:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(closure)
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None
