"""The meter counts steps of the leading optimizer, and gives speed by the median step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim import steps as steps_module
from fasttrain.shim.roots import Root
from fasttrain.shim.steps import StepMeter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the test say what time it is, in seconds."""
    now = [100.0]
    monkeypatch.setattr(steps_module.time, "perf_counter", lambda: now[0])
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


def root() -> Root:
    return Root(lambda: None, "Model", "train.py:1", trainable=True)  # type: ignore[arg-type]


def test_times_between_steps(meter: StepMeter, clock: list[float]) -> None:
    sgd = optimizer()
    for seconds in (0.0, 1.0, 2.0, 30.0):
        clock[0] += seconds
        sgd.step()
    stats = meter.stats(compile_s=5.0)
    assert (stats.steps, stats.median_step_s, stats.first_step_s) == (4, 2.0, 10.0)
    assert (stats.compile_s, stats.wall_s) == (5.0, 43.0)
    assert meter.recent_step_s() == 30.0


def test_samples_by_the_median_step(meter: StepMeter, clock: list[float]) -> None:
    sgd, model = optimizer(), root()
    for seconds in (1.0, 2.0, 2.0, 60.0):  # the last one compiles
        for _ in range(2):  # two batches of four are accumulated
            meter.count_samples(model, (torch.ones(4, 3),), {})
        clock[0] += seconds
        sgd.step()
    assert meter.stats(0.0).samples_per_s == 8 / 2.0


def test_only_the_first_root_of_a_step_counts(meter: StepMeter, clock: list[float]) -> None:
    sgd, encoder, decoder = optimizer(), root(), root()
    for _ in range(3):
        meter.count_samples(encoder, (None, torch.tensor(1.0)), {"x": torch.ones(4, 3)})
        meter.count_samples(decoder, (torch.ones(4, 2),), {})
        with torch.no_grad():
            meter.count_samples(encoder, (torch.ones(100, 3),), {})
        clock[0] += 1.0
        sgd.step()
    assert meter.stats(0.0).samples_per_s == 4.0


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


def test_before_any_step(meter: StepMeter) -> None:
    stats = meter.stats(0.0)
    assert (stats.steps, stats.median_step_s, stats.samples_per_s) == (0, 0.0, 0.0)
    assert meter.recent_step_s() == 0.0
    assert stats.peak_memory_bytes > 10_000_000  # torch alone takes more
