"""Figures are the device's, however far the host runs ahead of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.shim.hooks.steps import StepMeter
from support.run_ahead import RunAhead, running_ahead

STEPS = 40
QUEUEING_S = 0.001  # what the host needs to queue a step


class Loop:
    """Training whose work takes a device some time, and the host less."""

    def __init__(self, host: RunAhead, undo: ExitStack) -> None:
        self.host = host
        self.meter = StepMeter(host.now_s)
        self.meter.install(undo)
        self.optimizer = Still([host.parameter()], {})

    def step(self, seconds: float, x: Any = None) -> None:
        self.host.now_s += QUEUEING_S
        self.host.work(seconds)
        if x is not None:
            self.meter.throughput.backward()
        self.optimizer.step()


class Still(Optimizer):
    """An optimizer that leaves its parameters alone."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


@pytest.fixture(params=["cuda", "xpu"])
def loop(request: Any) -> Iterator[Loop]:
    with running_ahead(request.param) as host, ExitStack() as undo:
        yield Loop(host, undo)


def test_steps_take_as_long_as_the_device_does(loop: Loop) -> None:
    for number in range(STEPS):
        loop.step(0.03 if number % 10 == 9 else 0.01)
    loop.host.now_s += 10.0  # the script does something else
    stats = loop.meter.stats(0.0)
    assert stats.steps == STEPS
    assert stats.median_step_s == pytest.approx(0.01)
    assert stats.p95_step_s == pytest.approx(0.03)
    assert loop.meter.recent_step_s() == pytest.approx(0.03)
    assert loop.host.waits == 0


def test_only_steps_that_have_ended_are_timed(loop: Loop) -> None:
    """Steps end at 0.011 s, 0.021 s and so on, and the host has queued all by 0.040 s."""
    for _ in range(STEPS):
        loop.step(0.01)
    stats = loop.meter.stats(0.0)
    assert (stats.steps, len(loop.meter._intervals_s)) == (STEPS, 2)
    assert stats.p95_step_s == pytest.approx(0.01)
    assert loop.host.waits == 0


def test_a_device_that_waits_for_the_host(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.host.now_s += 0.004  # the loader is slow
        loop.step(0.0005)
    assert loop.meter.stats(0.0).median_step_s == pytest.approx(0.005)


def test_samples_are_those_of_steps_that_have_ended(loop: Loop) -> None:
    for (x,) in DataLoader(TensorDataset(torch.ones(STEPS * 8, 3)), batch_size=8):
        loop.step(0.01, x)
    assert loop.meter.stats(0.0).samples_per_s == pytest.approx(8 / 0.01)


def test_validation_that_waits_for_what_was_queued_before_it(loop: Loop) -> None:
    """What the host waits for at the first number that it reads is training, too.

    A device that has nothing to do waits for the host at the first step after each validation.
    """
    data = DataLoader(TensorDataset(torch.ones(STEPS * 8, 3)), batch_size=8)
    for _ in range(3):
        for (x,) in data:
            loop.step(0.01, x)
        with torch.no_grad():
            for _ in data:
                loop.host.work(0.02)
                loop.host.wait()
    steps = 3 * STEPS - 1
    training_s = steps * 0.01 + 2 * QUEUEING_S
    assert loop.meter.stats(0.0).samples_per_s == pytest.approx(8 * steps / training_s)


def test_an_event_is_recorded_on_the_device_of_the_step(loop: Loop) -> None:
    loop.host.current = 1
    for _ in range(STEPS):
        loop.step(0.01)
    loop.host.now_s += 1.0
    assert loop.meter.stats(0.0).median_step_s == pytest.approx(0.01)


def test_peak_memory_is_that_of_the_device_of_the_step(loop: Loop) -> None:
    loop.host.current = 1
    loop.step(0.01)
    assert loop.meter.stats(0.0).peak_memory_bytes == loop.host.peaks[0]


def test_peak_memory_before_any_step(loop: Loop) -> None:
    if loop.host.kind == "cuda":  # torch's first kind
        assert loop.meter.stats(0.0).peak_memory_bytes == loop.host.peaks[loop.host.current]
    model_on = f"{loop.host.kind}:1"
    assert loop.meter.stats(0.0, model_on).peak_memory_bytes == loop.host.peaks[1]


def test_a_process_that_trains_on_its_cpu_has_its_own_memory(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["params"] = [torch.ones(1)]
    loop.step(0.01)
    assert loop.meter.stats(0.0).peak_memory_bytes > 10_000_000


@pytest.mark.parametrize("fails", ["record", "query", "elapsed_time"])
def test_a_device_that_has_failed_raises_in_the_script_alone(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    loop.step(0.01)
    monkeypatch.setattr("support.run_ahead._Event." + fails, fail)
    loop.step(0.01)
    loop.host.now_s += 1.0
    assert loop.meter.stats(0.0).steps == 2


def test_a_captured_step_has_no_event(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.step(0.01)
    loop.host.capturing = True
    monkeypatch.setattr("support.run_ahead._Event.record", lambda *_: pytest.fail("captured"))
    loop.step(0.01)
    assert loop.meter.stats(0.0).median_step_s == pytest.approx(QUEUEING_S)


def test_a_captured_step_says_so(loop: Loop) -> None:
    assert not loop.meter.capturing, "no device is known"
    loop.step(0.01)
    assert not loop.meter.capturing
    loop.host.capturing = True
    assert loop.meter.capturing


def test_nothing_is_asked_about_earlier_steps_while_one_is_captured(loop: Loop) -> None:
    """The device hasn't ended them when the capture begins."""
    for _ in range(3):
        loop.step(0.01)
    loop.host.now_s += 1.0
    loop.host.capturing = True
    loop.step(0.0)
    assert loop.meter.stats(0.0).median_step_s == 0.0
    assert not loop.host.spoilt
    loop.host.capturing = False
    stats = loop.meter.stats(0.0)
    assert (stats.steps, len(loop.meter._intervals_s)) == (4, 3)


def test_a_forked_child_begins_with_the_clock_of_the_host(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.step(0.01)
    loop.meter.reset()
    monkeypatch.setattr("support.run_ahead._Event.record", lambda *_: pytest.fail("in a child"))
    loop.optimizer.param_groups[0]["params"] = [torch.ones(1)]
    for (x,) in DataLoader(TensorDataset(torch.ones(6, 3)), batch_size=2):
        loop.step(0.01, x)
    assert loop.meter.stats(0.0).median_step_s == pytest.approx(QUEUEING_S)
