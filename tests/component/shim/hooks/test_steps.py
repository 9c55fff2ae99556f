"""The meter counts iterations of the optimizers, and times them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.process import true_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the test say what time it is, in seconds."""
    now = [100.0]
    monkeypatch.setattr(true_clock, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def meter(clock: list[float]) -> Iterator[StepMeter]:
    with ExitStack() as undo:
        meter = StepMeter(started_s=90.0)
        meter.install(undo)
        yield meter


def optimizer() -> Any:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=0.1)


def test_times_between_steps(meter: StepMeter, clock: list[float]) -> None:
    sgd = optimizer()
    for seconds in (0.0, 1.0, 2.0, 30.0):
        clock[0] += seconds
        sgd.step()
    stats = meter.stats(compile_s=5.0)
    assert (stats.steps, stats.median_step_s, stats.first_step_s) == (4, 2.0, 10.0)
    assert (stats.compile_s, stats.wall_s) == (5.0, 43.0)
    assert meter.recent_step_s() == 30.0


def test_the_first_group_of_parameters_may_be_empty(meter: StepMeter) -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([{"params": []}, {"params": [parameter]}], lr=0.1).step()
    assert (meter.steps, meter.device) == (1, "cpu")


def test_a_second_optimizer_of_an_iteration_makes_no_step(
    meter: StepMeter, clock: list[float]
) -> None:
    heard: list[int] = []
    meter.on_step.append(heard.append)
    discriminator, generator = optimizer(), optimizer()
    for index in range(6):
        discriminator.step()
        if index % 2:
            generator.step()
    assert heard == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("turns", "steps"),
    [
        ("DG DG DG DG", 4),
        ("D D DG D D DG", 6),  # a critic that steps more often
        ("GD GD D GD", 4),
        ("D D D G G G", 5),  # the first G is in the third iteration of D
        ("ABC ABC", 2),
    ],
)
def test_an_optimizer_that_steps_again_begins_the_next_step(
    meter: StepMeter, turns: str, steps: int
) -> None:
    made = {name: optimizer() for name in "ABCDG"}
    for name in turns.replace(" ", ""):
        made[name].step()
    assert meter.steps == steps


def test_an_optimizer_that_was_made_since_begins_the_next_step(meter: StepMeter) -> None:
    """One for each fold: the count was that of the busiest, and never went on."""
    heard: list[int] = []
    meter.on_step.append(heard.append)
    for _ in range(5):
        sgd, other = optimizer(), optimizer()
        for _ in range(8):
            sgd.step()
            other.step()
    copy.deepcopy(sgd).step()
    assert heard == list(range(1, 42))


def test_backward_passes_where_no_optimizer_is_made(meter: StepMeter, clock: list[float]) -> None:
    heard: list[int] = []
    meter.on_pass.append(heard.append)
    weight = torch.ones((), requires_grad=True)
    for _ in range(4):
        clock[0] += 2.0
        (weight * 2).backward()
    stats = meter.stats(0.0)
    assert (stats.steps, stats.are_passes, stats.median_step_s) == (4, True, 2.0)
    assert heard == [1, 2, 3], "the fourth is not complete"
    sgd = optimizer()
    (weight * 2).backward()
    sgd.step()
    stats = meter.stats(0.0)
    assert (stats.steps, stats.are_passes) == (5, False)


def test_an_optimizer_that_cannot_be_made_has_no_frame_of_ours(meter: StepMeter) -> None:
    with pytest.raises(ValueError, match="empty parameter list") as caught:
        torch.optim.SGD([])
    assert not [entry for entry in caught.traceback if "fasttrain/shim" in str(entry.path)]


def test_before_any_step(meter: StepMeter) -> None:
    stats = meter.stats(0.0)
    assert (stats.steps, stats.median_step_s, stats.samples_per_s) == (0, 0.0, 0.0)
    assert meter.recent_step_s() == 0.0
    assert stats.peak_memory_bytes > 10_000_000  # torch alone takes more


@pytest.mark.parametrize(
    ("intervals", "p95"),
    [((2.0,), 2.0), ((1.0, 9.0), 9.0), ((1.0, 1.0, 9.0), 9.0), ((1.0,) * 19 + (9.0,), 1.0)],
)
def test_p95_is_of_the_nearest_rank(
    meter: StepMeter, clock: list[float], intervals: tuple[float, ...], p95: float
) -> None:
    """Of two or three intervals it was the shortest or the median one."""
    sgd = optimizer()
    sgd.step()
    for seconds in intervals:
        clock[0] += seconds
        sgd.step()
    stats = meter.stats(0.0)
    assert stats.p95_step_s == p95
    assert stats.median_step_s <= stats.p95_step_s
