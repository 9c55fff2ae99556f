"""Gradients that are no numbers are told once, with the step and the parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from fasttrain.shim.watch.nan_guard import (
    IN_A_ROW,
    SLOTS,
    SMALL,
    FiniteRing,
    NanGuard,
    parameter_name,
)

NAN, INF = math.nan, math.inf


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)


class Loop:
    """Steps of a model whose gradients the test gives."""

    def __init__(self, choice: Any, undo: ExitStack, **changes: Any) -> None:
        self.model = Net()
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.scale_falls = False
        self.guard = NanGuard(choice, lambda: self.scale_falls)
        self.guard.install(undo)

    def step(self, *values: float) -> None:
        for value in values:
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, value)
            self.sgd.step()


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as undo:
        yield undo


def test_warned_once(undo: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop("warn", undo)
    loop.step(1.0, 2.0, NAN, INF, NAN, NAN)
    loop.guard.read()
    (warning,) = loop.guard.warnings
    assert re.search(r"\bSGD\b.* step 3\b.* Net: first\.weight\b.*\b4\b", warning)
    loop.step(*[NAN] * 2 * SLOTS)
    loop.guard.read()
    assert loop.guard.warnings == [warning]
    assert capsys.readouterr().err.count("fasttrain: warning: ") == 1


def test_a_dry_run_has_no_numbers(undo: ExitStack) -> None:
    with torch.device("meta"):
        loop = Loop("stop", undo)
        for _ in range(SLOTS + 1):
            loop.model.second(loop.model.first(torch.ones(2, 3))).sum().backward()
            loop.sgd.step()
    loop.guard.read()
    assert loop.guard.warnings == []


def test_warned_in_the_middle_of_a_step(undo: ExitStack) -> None:
    loop = Loop("warn", undo)
    loop.step(*[NAN] * 2 * SLOTS)
    assert re.search(r" step 1\b", loop.guard.warnings[0])


def test_the_first_parameter_that_is_meant(undo: ExitStack) -> None:
    loop = Loop("warn", undo)
    loop.step(1.0)
    for _ in range(IN_A_ROW):
        for parameter in (loop.model.first.weight, loop.model.second.bias):
            parameter.grad = torch.full_like(parameter, -INF)
        loop.model.first.bias.grad = None
        loop.sgd.step()
    loop.guard.read()
    assert re.search(r" step 2\b.* Net: first\.weight\b.*\b2\b", loop.guard.warnings[0])


@pytest.mark.parametrize("values", [[NAN, NAN, 1.0, NAN, NAN], [1e30] * 9, [0.0] * 9])
def test_what_is_no_reason(undo: ExitStack, values: list[float]) -> None:
    loop = Loop("stop", undo)
    loop.step(*values)
    loop.guard.read()
    assert loop.guard.warnings == []


def test_a_row_over_two_readings(undo: ExitStack) -> None:
    loop = Loop("warn", undo)
    loop.step(1.0, NAN)
    loop.guard.read()
    loop.step(NAN)
    loop.guard.read()
    assert loop.guard.warnings == []
    loop.step(NAN)
    loop.guard.read()
    assert re.search(r" step 2\b", loop.guard.warnings[0])


def test_reading_is_not_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Levers put themselves there, to see what the script reads.
    for name in ("item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, lambda _: pytest.fail("read"))
    ring = FiniteRing()
    assert not any(ring.take(torch.ones(2)) for _ in range(SLOTS - 1))
    assert not ring.read()


def test_a_gap_ends_a_row() -> None:
    ring = FiniteRing()
    assert not ring._judge([1.0, NAN, NAN] + [1.0] * (SLOTS - 3), 3)
    # The copy came late: step 4 is overwritten, and step 5 begins another row.
    assert not ring._judge([1.0] * 4 + [NAN] + [1.0] * (SLOTS - 5), SLOTS + 4)


def test_a_full_ring_is_read_by_itself(undo: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop("stop", undo)
    loop.step(*[1.0] * SLOTS, *[NAN] * (SLOTS - 1))
    with pytest.raises(SystemExit) as stopped:
        loop.step(NAN)
    assert stopped.value.code == 65
    told = capsys.readouterr().err
    assert re.search(rf" step {SLOTS + 1}\b", told)
    assert "[not-finite]" in told
    assert "Net: first.weight" in told


def test_a_loss_scale_that_comes_down(undo: ExitStack) -> None:
    loop = Loop("warn", undo)
    loop.scale_falls = True
    loop.step(*[INF] * SLOTS)
    assert loop.guard.warnings == []
    loop.scale_falls = False
    loop.step(*[INF] * SLOTS)
    assert loop.guard.warnings


def test_off_leaves_the_step_alone(undo: ExitStack) -> None:
    before = dict(torch_optimizer._global_optimizer_post_hooks)
    loop = Loop("off", undo)
    assert torch_optimizer._global_optimizer_post_hooks == before
    loop.step(*[NAN] * 2 * SLOTS)
    assert loop.guard.warnings == []


def test_gradients_that_come_and_go(undo: ExitStack) -> None:
    loop = Loop("warn", undo)
    loop.sgd.step()  # none at all
    sparse = nn.Embedding(3, 2, sparse=True)
    other = torch.optim.SGD(sparse.parameters(), lr=0.0)
    sparse(torch.tensor([1])).sum().backward()
    other.step()
    loop.step(NAN, NAN)
    loop.model.first.weight.grad = None  # what was looked at
    loop.sgd.step()
    loop.guard.read()
    assert re.search(r" step 1\b.* Net: first\.bias\b.*\b3\b", loop.guard.warnings[0])


def test_low_precision_and_graphs_of_gradients(undo: ExitStack) -> None:
    loop = Loop("warn", undo)
    loop.model.to(torch.bfloat16)
    for _ in range(IN_A_ROW):
        for parameter in loop.model.parameters():
            # As create_graph=True leaves it
            parameter.grad = (parameter * NAN).requires_grad_()
        loop.sgd.step()
    loop.guard.read()
    assert loop.guard.warnings


def test_a_large_gradient_is_not_looked_at(undo: ExitStack) -> None:
    loop = Loop("warn", undo)
    table, bias = nn.Parameter(torch.ones(SMALL + 1)), nn.Parameter(torch.ones(2))
    other = torch.optim.SGD([table, bias], lr=0.0)
    for _ in range(IN_A_ROW):
        table.grad, bias.grad = torch.full_like(table, NAN), torch.ones(2)
        other.step()
    loop.guard.read()
    assert loop.guard.warnings == [], "before it has come to other parameters, a step later"


def test_names_of_parameters() -> None:
    whole = nn.Sequential(Net(), nn.Linear(2, 2))
    assert parameter_name(whole[0].second.bias) == "Sequential: 0.second.bias"
    assert parameter_name(nn.Parameter(torch.ones(2, 3))).endswith(" (2, 3)")


def test_fp16_may_overflow_until_its_scale_has_come_down(rig: Any) -> None:
    with rig(amp="float16", nan="warn") as runtime:
        model = nn.Linear(4, 4)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
        for _ in range(12):
            (model(torch.ones(8, 4)) * 1000.0).sum().backward()
            sgd.step()
            sgd.zero_grad()
        counts = runtime.outcomes()["loss_scaling"].counts
        runtime._nan.read()
        assert counts["skipped steps"] >= IN_A_ROW
        assert counts["scale"] >= 1
        assert runtime._nan.warnings == []
