"""The program of ``--compile auto``, which goes on after each step."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fasttrain.model.compile_auto import Switched
from fasttrain.shim.compile_auto.follower import FollowingCompile
from fasttrain.shim.compile_auto.outlook import StepClock


def test_a_step_of_another_thread_leaves_the_program_alone() -> None:
    auto: Any = FollowingCompile.__new__(FollowingCompile)
    auto._clock, auto._owner, auto._found = StepClock(), os.getpid(), Switched("watching")
    auto._stepping = threading.Lock()
    steps: list[int] = []

    def program() -> Any:
        while True:
            yield
            if len(steps) == 0:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(auto._after_step, 2).result()
            steps.append(1)

    auto._program = program()
    next(auto._program)
    auto._after_step(1)
    auto._after_step(3)
    assert len(steps) == 2
