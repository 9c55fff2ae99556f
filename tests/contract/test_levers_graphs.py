"""CUDA graphs are taken only in loops that are safe for them; here the decisions, without a GPU.

The mode with graphs is compiled by a backend that marks its calls, the mode without by another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.levers.compile.graphs import (
    CALLED_AGAIN,
    HOOKED,
    INPUT_GRADIENT,
    KEPT_GRADIENTS,
    OTHER_SHAPES,
    WITHOUT_GRAPHS,
)
from fasttrain.shim.levers.compile.lever import SEVERAL_MODELS
from support.rig import network, rig

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # inductor's import
]
STEPS = 8
PROBATION = 3


class Modes:
    """Records by which of the two modes each compiled call was made."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        original = torch.compile

        def compile_quickly(model: Any = None, mode: str | None = None, **_: Any) -> Any:
            kind = "graphs" if mode == "reduce-overhead" else "plain"
            compiled = original(model, backend="eager")

            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls.append(kind)
                return compiled(*args, **kwargs)

            return call

        with mock.patch.object(torch, "compile", compile_quickly):
            yield


def run(loop: Callable[[nn.Module, Any], None], model: nn.Module | None = None) -> tuple[Any, Any]:
    """Run a loop under the guard; give its calls' modes and the lever's outcome."""
    modes = Modes()
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modes.recorded(), rig(compile="default", graphs="reduce-overhead") as runtime:
        loop(model, optimizer)
        outcome = runtime.outcomes()["compile"]
    return modes.calls, outcome


def batch(rows: int = 4) -> Tensor:
    return torch.ones(rows, 4)


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_a_plain_loop_gets_graphs_after_its_probation() -> None:
    def loop(model: nn.Module, optimizer: Any) -> None:
        for _ in range(STEPS):
            step(model, optimizer, batch())

    calls, _ = run(loop)
    assert calls == ["plain"] * PROBATION + ["graphs"] * (STEPS - PROBATION)


def accumulates(model: nn.Module, optimizer: Any) -> None:
    for micro in range(STEPS):
        model(batch()).mean().backward()
        if micro % 2:
            optimizer.step()
            optimizer.zero_grad()


def calls_twice(model: nn.Module, optimizer: Any) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(batch()) - model(2 * batch())).square().mean().backward()
        optimizer.step()


def never_steps(model: nn.Module, optimizer: Any) -> None:
    for _ in range(STEPS):
        model(batch()).mean().backward()
        for p in model.parameters():
            p.data.sub_(p.grad, alpha=0.01)
            p.grad = None


def keeps_parameter_gradients(model: nn.Module, optimizer: Any) -> None:
    kept = []
    for _ in range(STEPS):
        step(model, optimizer, batch())
        kept.append(next(model.parameters()).grad)


def hooks_parameters(model: nn.Module, optimizer: Any) -> None:
    next(model.parameters()).register_hook(lambda gradient: None)
    for _ in range(STEPS):
        step(model, optimizer, batch())


def hooks_accumulation(model: nn.Module, optimizer: Any) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    for _ in range(STEPS):
        step(model, optimizer, batch())


def wants_input_gradients(model: nn.Module, optimizer: Any) -> None:
    for _ in range(STEPS):
        step(model, optimizer, batch().requires_grad_())


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (accumulates, CALLED_AGAIN),
        (calls_twice, CALLED_AGAIN),
        (never_steps, CALLED_AGAIN),
        (keeps_parameter_gradients, KEPT_GRADIENTS),
        (hooks_parameters, HOOKED),
        (hooks_accumulation, HOOKED),
        (wants_input_gradients, INPUT_GRADIENT),
    ],
)
def test_a_loop_that_graphs_would_make_wrong_gets_none(loop: Any, reason: str) -> None:
    calls, outcome = run(loop)
    assert "graphs" not in calls
    assert any(WITHOUT_GRAPHS in note and reason in note for note in outcome.notes)


def test_graphs_are_given_up_before_the_first_unsafe_call() -> None:
    def loop(model: nn.Module, optimizer: Any) -> None:
        for _ in range(STEPS):
            step(model, optimizer, batch())
        accumulates(model, optimizer)
        for _ in range(STEPS):
            step(model, optimizer, batch())

    calls, _ = run(loop)
    # the accumulating part's first call comes before the gradients that it will add to
    last = STEPS + 1
    assert set(calls[PROBATION:STEPS]) == {"graphs"}
    assert set(calls[last:]) == {"plain"}


def test_validation_and_other_shapes_run_without_graphs() -> None:
    def loop(model: nn.Module, optimizer: Any) -> None:
        for _ in range(STEPS):
            step(model, optimizer, batch())
        with torch.no_grad():
            model(batch())
        step(model, optimizer, batch(rows=3))
        step(model, optimizer, batch())
        optimizer.zero_grad()
        model.eval()
        model(batch())

    calls, outcome = run(loop)
    assert calls[STEPS:] == ["plain", "plain", "graphs", "plain"]
    assert OTHER_SHAPES in outcome.notes


def test_several_models_get_none() -> None:
    def loop(model: nn.Module, optimizer: Any) -> None:
        other = network()
        for number in range(STEPS):
            step(model, optimizer, batch())
            if number == PROBATION + 1:
                other(batch())

    calls, outcome = run(loop)
    assert calls.count("graphs") == 2
    assert calls[-1] == "plain"
    assert any(SEVERAL_MODELS in note for note in outcome.notes)


def test_what_a_replay_gives_is_a_copy() -> None:
    """The next replay writes to the same memory: outputs that a script keeps must not be in it."""
    static = torch.zeros(4, 4)

    class Static(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"out": self.linear(x), "kept": [static]}

    def loop(model: nn.Module, optimizer: Any) -> None:
        for number in range(STEPS):
            optimizer.zero_grad()
            output = model(batch())
            output["out"].mean().backward()
            optimizer.step()
            assert (output["kept"][0] is static) == (number < PROBATION)
            assert output["out"].requires_grad

    run(loop, Static())


def test_hooks_that_change_end_graphs() -> None:
    def loop(model: nn.Module, optimizer: Any) -> None:
        for number in range(STEPS):
            if number == PROBATION + 1:
                model.register_forward_hook(lambda *_: None)
            step(model, optimizer, batch())

    calls, outcome = run(loop)
    assert calls.count("graphs") == 1
    assert any("hooks" in note for note in outcome.notes)


def test_results_are_those_without_the_guard() -> None:
    found: list[float] = []

    def loop(model: nn.Module, optimizer: Any) -> None:
        found.extend(step(model, optimizer, batch()).item() for _ in range(STEPS))

    run(loop)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert found == [step(model, optimizer, batch()).item() for _ in range(STEPS)]
