"""A ring on a device is copied to the host in that device's own time, and nothing waits for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fasttrain.shim.watch.nan_guard import IN_A_ROW, SLOTS, FiniteRing
from support.run_ahead import OnCpu, RunAhead, running_ahead

BUSY_S = 5.0


@pytest.fixture(params=["cuda", "xpu"])
def host(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunAhead]:
    def waits(_: Any) -> Any:
        pytest.fail("waits for the device")

    for name in ("item", "tolist", "cpu"):
        monkeypatch.setattr("support.run_ahead.OnDevice." + name, waits, raising=False)
    with running_ahead(request.param) as host, OnCpu():
        yield host


def fill(ring: FiniteRing, host: RunAhead, index: int, *values: float) -> None:
    for value in values:
        ring.take(torch.full((2,), value, device=f"{host.kind}:{index}"))


def test_the_copy_has_arrived_once_the_device_of_the_numbers_is_there(host: RunAhead) -> None:
    """The current device is another one, and has nothing to do."""
    ring = FiniteRing()
    host.work(BUSY_S, index=1)
    fill(ring, host, 1, *[math.nan] * IN_A_ROW)
    assert not ring.read(), "only begins the copy"
    assert not ring.read(), "it can't have arrived"
    host.now_s += BUSY_S
    assert ring.read()
    assert host.waits == 0


def test_a_busy_current_device_holds_up_no_other(host: RunAhead) -> None:
    ring = FiniteRing()
    host.work(BUSY_S, index=0)
    fill(ring, host, 1, *[math.nan] * IN_A_ROW)
    assert not ring.read()
    assert ring.read()


def test_a_reading_is_judged_by_what_was_noted_before_it(host: RunAhead) -> None:
    ring = FiniteRing()
    fill(ring, host, 0, 1.0, math.nan, math.nan)
    ring.read()
    fill(ring, host, 0, math.nan)
    assert not ring.read()
    assert ring.read()
    assert ring.since == 2


@pytest.mark.parametrize("begun", [False, True])
def test_a_capture_is_left_alone(host: RunAhead, begun: bool) -> None:
    """A question about the copy's event would end it, and a copy would be in the graph."""
    ring = FiniteRing()
    fill(ring, host, 0, *[math.nan] * IN_A_ROW)
    if begun:
        ring.read()
    host.capturing = True
    fill(ring, host, 0, 1.0)
    with mock.patch.object(ring, "_begin_copy", side_effect=AssertionError):
        assert not ring.read()
    assert not host.spoilt
    host.capturing = False
    assert ring.read() or ring.read()
    assert ring.since == 1


def test_the_default_type_of_the_script_is_not_that_of_the_ring(host: RunAhead) -> None:
    ring = FiniteRing()
    torch.set_default_dtype(torch.float64)
    try:
        fill(ring, host, 0, *[1.0] * SLOTS)
        ring.read()
        assert not ring.read()
    finally:
        torch.set_default_dtype(torch.float32)
