"""Fused optimizers on a GPU: the steps and checkpoints of the unfused ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.model.outcome import State
from fasttrain.shim.levers.optimizer import _refuses_cuda

pytestmark = pytest.mark.gpu

STEPS = 5
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=1e-3),
}
if _refuses_cuda(torch.optim.Adagrad):  # as torch 2.11 does
    del MAKERS["adagrad"]
every_optimizer = pytest.mark.parametrize("name", MAKERS)


def train(name: str, device: str, state: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    optimizer = MAKERS[name](model.parameters())
    if state is not None:
        optimizer.load_state_dict(state)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(16, 32, generator=generator).to(device)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model, optimizer


def assert_close(found: Any, expected: Any) -> None:
    """Compare structures: devices, dtypes and kinds exactly, floating values to rounding."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)  # device and dtype too
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_close(found[key], value)
    else:
        assert found == expected


@every_optimizer
def test_fused_steps_and_checkpoints_are_the_unfused_ones(rig: Any, device: str, name: str) -> None:
    model, optimizer = train(name, device)
    with rig(optimizer="fused") as runtime:
        fused_model, fused_optimizer = train(name, device)
        state = fused_optimizer.state_dict()
        outcome = runtime.outcomes()["optimizer"]
    assert (outcome.state, outcome.counts) == (State.APPLIED, {"steps": STEPS})
    assert_close(fused_model.state_dict(), model.state_dict())
    assert_close(state, optimizer.state_dict())


@every_optimizer
def test_the_fused_kernel_really_runs(
    rig: Any, device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = f"_fused_{name}_"
    original, calls = getattr(torch, kernel), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0][0].device.type)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, kernel, counted)
    train(name, device)
    assert calls == []
    with rig(optimizer="fused"):
        train(name, device)
    assert calls == [device] * STEPS


@every_optimizer
@pytest.mark.parametrize("fused_first", [True, False])
def test_checkpoints_interchange(rig: Any, device: str, name: str, fused_first: bool) -> None:
    choices = ["fused", "keep"] if fused_first else ["keep", "fused"]
    with rig(optimizer=choices[0]):
        state = train(name, device)[1].state_dict()
    with rig(optimizer=choices[1]):
        model, optimizer = train(name, device, state)
        found = optimizer.state_dict()
    plain_model, plain = train(name, device, train(name, device)[1].state_dict())
    assert_close(model.state_dict(), plain_model.state_dict())
    assert_close(found, plain.state_dict())


def test_a_model_of_two_devices_takes_fused_steps(rig: Any, cuda: str) -> None:
    """As with an embedding that is kept on the CPU."""

    def train_both() -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, device=cuda))]
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (parameters[0].square().sum() + parameters[1].sin().sum().cpu()).backward()
            optimizer.step()
        return [p.detach().cpu() for p in parameters]

    expected = train_both()
    with rig(optimizer="fused") as runtime:
        found = train_both()
        assert runtime.outcomes()["optimizer"].counts == {"steps": 3}
    torch.testing.assert_close(found, expected)
