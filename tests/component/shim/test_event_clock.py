"""Two clocks in the events, of which one may jump."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from fasttrain.shim.reporter import Clock

HOUR_S = 3600.0


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the time of day so many seconds ahead of what it is."""
    real = time.time

    def ahead(by_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + by_s)

    return ahead


def test_both_clocks_go_on_alike() -> None:
    clock = Clock()
    before_s = time.monotonic()
    now = clock.read(1)
    assert set(now) == {"time_s", "monotonic_s"}
    assert before_s <= now["monotonic_s"] <= time.monotonic()
    assert abs(now["time_s"] - time.time()) < 1
    assert clock.warnings == []


@pytest.mark.parametrize(("by_s", "told"), [(HOUR_S, "3,600 s"), (-30, "30 s")])
def test_a_jump_is_in_one_event_and_told(set_clock: Callable, by_s: float, told: str) -> None:
    clock = Clock()
    clock.read(1)
    set_clock(by_s)
    assert clock.read(7)["clock_jump_s"] == pytest.approx(by_s, abs=0.5)
    assert "clock_jump_s" not in clock.read(8)
    (warning,) = clock.warnings
    assert f" {told} " in warning
    assert " step 7" in warning


def test_of_several_jumps_the_first_is_told(set_clock: Callable) -> None:
    clock = Clock()
    set_clock(HOUR_S)
    clock.read(1)
    set_clock(0)
    assert clock.read(2)["clock_jump_s"] == pytest.approx(-HOUR_S, abs=0.5)
    assert len(clock.warnings) == 1


def test_a_clock_that_is_slewed_does_not_jump(set_clock: Callable) -> None:
    clock = Clock()
    for step in range(5):
        set_clock(1.8 * step)
        assert "clock_jump_s" not in clock.read(step)
    assert clock.warnings == []
