from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from fasttrain.launch.process import stop as stops
from fasttrain.launch.process.stop import INTERRUPTED, Stop

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


@pytest.fixture
def patient(clock: Clock, told: list[str]) -> Stop:
    return Stop(5, told.append, may_go_on=True)


def test_a_script_may_handle_ctrl_c_and_go_on(patient: Stop, clock: Clock, told: list[str]) -> None:
    for _ in range(2):  # the next ctrl-C is the first again
        patient.hear(INT)
        clock.now_s += 29
        assert not patient.due()
        assert patient.signum == INT
        clock.now_s += 1
        assert not patient.due()
        assert patient.signum == 0
    first, second = told
    assert first == second
    assert " 5 s " not in first


def test_a_second_ctrl_c_ends_what_might_go_on(patient: Stop, clock: Clock) -> None:
    patient.hear(INT)
    clock.now_s += 29
    patient.hear(INT)
    clock.now_s += 2
    assert (patient.due(), patient.now, patient.signum) == (True, True, INT)


@pytest.mark.parametrize("number", [TERM, HUP])
def test_other_signals_have_their_clock_also_after_ctrl_c(
    patient: Stop, clock: Clock, number: signal.Signals
) -> None:
    patient.hear(INT)
    clock.now_s += 27
    patient.hear(number)
    clock.now_s += 4
    assert not patient.due()
    clock.now_s += 1
    assert (patient.due(), patient.signum) == (True, INT)


def test_a_signal_that_is_ignored_here_is_none(stop: Stop, clock: Clock) -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        stop.hear(HUP)
    finally:
        signal.signal(HUP, before)
    clock.now_s += 100
    assert not stop.due()


@pytest.mark.parametrize(("number", "begin"), [(INT, INTERRUPTED), (TERM, "SIGTERM")])
def test_the_user_is_told_once_and_only_when_it_takes_time(
    stop: Stop, clock: Clock, told: list[str], number: signal.Signals, begin: str
) -> None:
    stop.hear(number)
    assert (stop.due(), told) == (False, [])
    clock.now_s += 1.1
    assert not stop.due()
    assert not stop.due()
    (line,) = told
    assert line.startswith(f"{begin}. ")
    assert " 30 s " in line


USR2 = signal.SIGUSR2


@pytest.mark.parametrize(
    ("signals", "sent"),
    [
        ([TERM], [USR2]),
        ([TERM, TERM], [USR2, USR2]),  # one, to the process and to its group
        ([TERM, 1.0, TERM], [USR2, TERM]),
        ([INT, 1.0, TERM], [INT, TERM]),
        ([HUP], [HUP]),
        ([USR1, TERM], [USR1, USR2]),
    ],
)
def test_a_run_that_can_save_itself_is_asked_to_by_sigterm(
    clock: Clock, told: list[str], signals: list[Any], sent: list[signal.Signals]
) -> None:
    stop, passed_on = Stop(30, told.append, save=USR2), []
    for step in signals:
        if isinstance(step, float):
            clock.now_s += step
        else:
            stop.hear(step)
            passed_on.append(stop.passed_on(step, sender=1))
    assert passed_on == sent
    assert stop.signum  # and the clock runs


def test_the_launchers_own_sigterm_goes_through(clock: Clock, told: list[str], stop: Stop) -> None:
    saving = Stop(30, told.append, save=USR2)
    saving.hear(TERM)
    assert saving.passed_on(TERM, sender=os.getpid()) == TERM
    stop.hear(TERM)
    assert stop.passed_on(TERM, sender=1) == TERM


@pytest.mark.parametrize(
    ("save", "signals", "preempted", "exit_code"),
    [
        (USR2, [USR2], True, 85),
        (USR2, [TERM], True, 85),
        (USR2, [USR2, INT], True, 130),
        (USR2, [INT], False, 130),
        (0, [TERM], False, 143),
        (0, [USR2], False, 128),  # which ends nothing
    ],
)
def test_what_a_run_without_processes_ends_with(
    clock: Clock, told: list[str], save: int, signals: list[Any], preempted: bool, exit_code: int
) -> None:
    stop = Stop(30, told.append, save=save)
    for signum in signals:
        stop.hear(signum)
    assert (stop.preempted, stop.exit_code) == (preempted, exit_code)
