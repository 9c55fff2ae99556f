from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fasttrain.launch import stop as stops
from fasttrain.launch.stop import Stop

INT, TERM, HUP, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


class Clock:
    """A time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(stops, "time", made)
    before = signal.signal(INT, signal.default_int_handler)
    yield made
    signal.signal(INT, before)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def stop(clock: Clock, told: list[str]) -> Stop:
    return Stop(30, told.append)


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_a_signal_that_asks_for_the_end_starts_the_clock(
    stop: Stop, clock: Clock, number: signal.Signals
) -> None:
    assert not stop.due()
    stop.hear(number)
    clock.now_s += 29.9
    assert not stop.due()
    clock.now_s += 0.1
    assert stop.due()
    assert stop.signum == number


@pytest.mark.parametrize("number", [USR1, signal.SIGUSR2, signal.SIGQUIT])
def test_others_are_only_passed_on(stop: Stop, clock: Clock, number: signal.Signals) -> None:
    stop.hear(number)
    clock.now_s += 100
    assert not stop.due()


@pytest.mark.parametrize(
    ("first", "second", "after_s", "now"),
    [
        (INT, INT, 0.6, True),
        (TERM, INT, 0.6, True),
        (INT, INT, 0.4, False),  # one ctrl-C that was sent on to the group
        (INT, TERM, 5.0, False),
        (TERM, TERM, 5.0, False),
    ],
)
def test_a_second_ctrl_c_is_impatience(
    stop: Stop,
    clock: Clock,
    first: signal.Signals,
    second: signal.Signals,
    after_s: float,
    now: bool,
) -> None:
    stop.hear(first)
    clock.now_s += after_s
    stop.hear(second)
    assert (stop.due(), stop.now, stop.signum) == (now, now, first)


def test_a_signal_that_is_ignored_here_is_none(stop: Stop, clock: Clock) -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        stop.hear(HUP)
    finally:
        signal.signal(HUP, before)
    clock.now_s += 100
    assert not stop.due()


def test_the_user_is_told_once_and_only_when_it_takes_time(
    stop: Stop, clock: Clock, told: list[str]
) -> None:
    stop.hear(TERM)
    assert (stop.due(), told) == (False, [])
    clock.now_s += 1.1
    assert not stop.due()
    assert not stop.due()
    (text,) = told
    assert "SIGTERM" in text
    assert "30 s" in text
