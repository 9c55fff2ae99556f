"""The program of ``--compile auto``, which goes on after each step."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.model.compile_auto import Switched
from fasttrain.shim.compile_auto.follower import FollowingCompile
from fasttrain.shim.compile_auto.outlook import StepClock


class OutOfTimeError(Exception):
    """Raised by a signal handler of the script's."""


def raise_it(*_: Any) -> None:
    raise OutOfTimeError


@pytest.fixture
def auto() -> Any:
    made: Any = FollowingCompile.__new__(FollowingCompile)
    made._clock, made._owner, made._found = StepClock(), os.getpid(), Switched("watching")
    made._idle = 0
    made._stepping, made._meter = threading.Lock(), SimpleNamespace(capturing=False)
    return made


def test_a_step_of_another_thread_leaves_the_program_alone(auto: Any) -> None:
    steps: list[int] = []

    def program() -> Any:
        while True:
            yield 1
            if len(steps) == 0:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(auto._after_step, 2).result()
            steps.append(1)

    auto._program = program()
    next(auto._program)
    auto._after_step(1)
    auto._after_step(3)
    assert len(steps) == 2


def test_an_exception_of_a_signal_handler_is_the_scripts(auto: Any) -> None:
    steps: list[int] = []

    def program() -> Any:
        while True:
            yield 1
            if not steps:
                signal.raise_signal(signal.SIGUSR2)
            steps.append(1)

    auto._program = program()
    next(auto._program)
    before = signal.signal(signal.SIGUSR2, raise_it)
    try:
        with pytest.raises(OutOfTimeError):
            auto._after_step(1)
        auto._after_step(2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(steps) == 2


def test_a_step_that_the_script_captures_decides_nothing(auto: Any) -> None:
    """It would wait for the device, which ends the capture with an error."""
    steps: list[int] = []

    def program() -> Any:
        while True:
            yield 1
            steps.append(1)

    auto._program = program()
    next(auto._program)
    for auto._meter.capturing in (True, False, True):
        auto._after_step(1)
    assert len(steps) == 1


def test_a_program_goes_on_after_as_many_steps_as_it_yields(auto: Any) -> None:
    resumed: list[int] = []

    def program() -> Any:
        for steps in (3, 1, 2, 9):
            yield steps
            resumed.append(step)

    auto._program = program()
    auto._resume(auto._program)  # the first steps are those that it yields here
    for step in range(1, 10):
        auto._after_step(step)
    assert resumed == [3, 4, 6]
    assert auto._clock.last_s > 0  # steps are timed while it waits
