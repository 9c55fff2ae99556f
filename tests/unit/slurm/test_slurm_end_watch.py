"""When a run that was warned is ended, by a clock that is moved."""

from __future__ import annotations

import os
import signal

import pytest

from fasttrain.slurm import follow
from fasttrain.slurm.follow import EndWatch


class Clock:
    """A clock, and the signals that this process sent itself."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.sent: list[int] = []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()

    def kill(pid: int, signum: int) -> None:
        assert pid == os.getpid()
        made.sent.append(signum)

    monkeypatch.setattr(follow.time, "monotonic", lambda: made.now_s)
    monkeypatch.setattr(follow.os, "kill", kill)
    return made


def ended_at(watch: EndWatch, clock: Clock, until_s: float) -> float | None:
    """Return after how many seconds the run was ended."""
    began_s = clock.now_s
    while clock.now_s - began_s < until_s:
        clock.now_s += 0.5
        watch.tick()
        if clock.sent:
            return clock.now_s - began_s
    return None


@pytest.mark.parametrize(("lead_s", "after_s"), [(90, 55.5), (40, 20.5), (10, 5.5)])
def test_a_run_that_goes_on_is_ended_in_time_to_shut_down(
    clock: Clock, lead_s: int, after_s: float
) -> None:
    watch = EndWatch("USR2", lead_s)
    watch.heard(signal.SIGUSR2)
    clock.now_s += 1  # a second warning, as without cgroups, changes nothing
    watch.heard(signal.SIGUSR2)
    assert ended_at(watch, clock, lead_s) == after_s - 1
    assert clock.sent == [signal.SIGTERM]
    assert (watch.warned, watch.stopped) == (True, True)
    watch.tick()
    assert clock.sent == [signal.SIGTERM]


def test_another_signal_is_no_warning(clock: Clock) -> None:
    watch = EndWatch("USR2", 90)
    watch.heard(signal.SIGUSR1)
    assert ended_at(watch, clock, 200) is None
    assert (watch.warned, watch.stopped) == (False, False)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_already_is_left_alone(clock: Clock, signum: int) -> None:
    watch = EndWatch("USR1", 90)
    watch.heard(signal.SIGUSR1)
    watch.heard(signum)
    assert watch.stopped
    assert ended_at(watch, clock, 200) is None
