"""Counts of steps that a device skips come to the host by copies that nothing waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fasttrain.shim.levers.loss_scaling import device_steps
from fasttrain.shim.levers.loss_scaling.device_steps import Counted, Tally
from support.run_ahead import OnCpu, running_ahead

BUSY_S = 5.0
ONE, ZERO, SCALE = torch.ones(()), torch.zeros(()), torch.tensor(8.0)


class Copies:
    """Takes the place of copies from a device, which arrive when the test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.arrived = False

    def __call__(self, numbers: Any, counts: Any) -> Any:
        self.begun += 1
        return _Copy(self, numbers.tolist(), counts)


class _Copy:
    def __init__(self, copies: Copies, numbers: list[float], counts: Any) -> None:
        self._copies, self._numbers, self._counts = copies, numbers, counts

    def has_arrived(self) -> bool:
        return self._copies.arrived

    def counted(self) -> Counted:
        return self._counts.given(self._numbers)  # type: ignore[no-any-return]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    found = Copies()
    monkeypatch.setattr(device_steps, "_Copy", found)
    monkeypatch.setattr(device_steps, "is_behind", lambda _: True)
    return found


def test_a_number_on_the_host_is_read_at_once() -> None:
    tally = Tally(64.0)
    tally.made, tally.skipped = 3, 1
    for found in (ZERO, ONE, ONE):
        tally.add(found)
    assert tally.read(SCALE, wait=False) == Counted(8.0, made=4, skipped=3)


def test_what_has_not_arrived_is_not_waited_for(copies: Copies) -> None:
    tally = Tally(64.0)
    tally.add(ONE)
    for _ in range(3):
        assert tally.read(SCALE, wait=False) == Counted(64.0, 0, 0)
    assert copies.begun == 1


def test_a_copy_that_has_arrived_counts_what_was_made_before_it(copies: Copies) -> None:
    tally = Tally(64.0)
    tally.add(ONE)
    tally.add(ZERO)
    tally.read(SCALE, wait=False)
    tally.add(ZERO)
    copies.arrived = True
    assert tally.read(SCALE, wait=False) == Counted(8.0, made=1, skipped=1)
    assert tally.read(SCALE, wait=False) == Counted(8.0, made=2, skipped=1)


def test_the_end_waits_for_the_last_steps(copies: Copies) -> None:
    tally = Tally(64.0)
    tally.add(ZERO)
    tally.read(SCALE, wait=False)
    tally.add(ONE)
    copies.arrived = True
    assert tally.read(SCALE, wait=True) == Counted(8.0, made=1, skipped=1)


def test_the_end_does_not_wait_for_a_stuck_device(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_steps, "WAIT_S", 0.01)
    assert Tally(64.0).read(SCALE, wait=True) == Counted(64.0, 0, 0)
    assert copies.begun == 1


def test_a_copy_arrives_in_the_time_of_its_own_device() -> None:
    """Nothing waits for it, whichever device is the current one and which the default type."""
    with running_ahead() as host, OnCpu():
        one: Any = torch.ones((), device="cuda:0")
        host.current = 1
        host.work(BUSY_S, index=0)
        tally = Tally(64.0)
        tally.add(one)
        for _ in range(2):
            assert tally.read(8 * one, wait=False) == Counted(64.0, 0, 0)
        host.now_s += BUSY_S
        assert tally.read(8 * one, wait=False) == Counted(8.0, made=0, skipped=1)
    assert host.waits == 0


def test_a_device_that_has_failed_ends_no_report(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(device_steps, "_Copy", fail)
    assert Tally(64.0).read(SCALE, wait=True) == Counted(64.0, 0, 0)


@pytest.mark.parametrize("begun", [False, True])
def test_a_capture_is_left_alone(begun: bool) -> None:
    """A question about the copy's event would end it, and a copy would be in the graph."""
    with running_ahead() as host, OnCpu():
        one: Any = torch.ones((), device="cuda:0")
        tally = Tally(64.0)
        tally.add(one)
        if begun:
            tally.read(8 * one, wait=False)
        host.capturing = True
        for _ in range(2):
            assert tally.read(8 * one, wait=False) == Counted(64.0, 0, 0)
        assert not host.spoilt
        host.capturing = False
        tally.read(8 * one, wait=False)
        assert tally.read(8 * one, wait=False) == Counted(8.0, made=0, skipped=1)


def test_a_forked_child_counts_from_zero() -> None:
    tally = Tally(64.0)
    tally.made, tally.skipped = 3, 1
    tally.add(ONE)
    tally.reset()
    assert tally.read(SCALE, wait=False) == Counted(8.0, 0, 0)
