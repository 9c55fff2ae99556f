"""No step waits for its device, but where this file says so, why, and how often.

On a GPU a wait in each step costs what the host would have run ahead. The loops of
``support/rehearsals.py`` run on a simulated device, on which every operator is seen that would wait
on a real one: numbers that are read, copies to the host and from memory that isn't pinned, shapes
that depend on numbers. What the autograd engine, DDP and torch's optimizers do in C++ isn't seen.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.npu_site import CACHE
from support.rehearsals import ALONE, RANKS, STEPS, STEPS_OF_RANKS
from support.synchronizations import FROM_DEVICE, FROM_HOST, READ, SHAPE, WAIT

pytestmark = pytest.mark.runs
TESTS = Path(__file__).parents[2]

# When: in each step; with each event, twice a second (here in each step) and each report; at calls
# 1, 2, 4, 8 and so on of a model that is split, and steps of the same numbers.
STEP, EVENT, POWER = "step", "event", "power of two"
POWERS = {0, 1, 3, 7}
SCALING, SPLIT = "levers/loss_scaling", "data_parallel"

# What is left: in which loops, what, in which function, when, and why.
LEFT: list[tuple[str, str, str, str, str]] = [
    ("fp16", READ, f"{SCALING}/lever.py: LossScaling._check", STEP,
     "where no kernel skips by itself, the host decides on each step, as in GradScaler.step"),
    ("fp16", FROM_DEVICE, f"{SCALING}/device_steps.py: Tally.read", EVENT,
     "figures of the event; on CUDA they come by copies for which nothing waits"),
    ("fp16, autograd.grad", READ, f"{SCALING}/lever.py: _finite", STEP,
     "autograd.grad hands gradients to the script, and is repeated before that if they overflowed"),
    ("ranks", FROM_DEVICE, f"{SPLIT}/split/call.py: SplitCalls._check_inputs", POWER,
     "ranks compare their batches"),
    ("ranks", FROM_DEVICE, f"{SPLIT}/tensor_sums.py: values_of", POWER,
     "a trial shows what a call changes; ranks compare their weights"),
    ("ranks", READ, f"{SPLIT}/split/agreement.py: ", POWER, "a trial compares two calls"),
    ("ranks", FROM_HOST, f"{SPLIT}/split/lazy_rows.py: Moves._by_rows", POWER,
     "a trial's random gradients"),
    ("ranks", FROM_HOST, f"{SPLIT}/replica.py: Replica.call", POWER,
     "DDP arranges its buckets, once"),
    ("ranks", FROM_DEVICE, f"{SPLIT}/replica.py: Replica.call", POWER,
     "DDP arranges its buckets, once"),
]  # fmt: skip

Found = dict[str, tuple[list[tuple[str, str, list[int]]], dict[str, str]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Return what synchronised in each loop, and its levers; of a process that has the device."""
    if not shutil.which("c++") and not shutil.which("g++"):
        pytest.skip("no C++ compiler to build the simulated device with")
    program = f"from support.rehearsals import main; main({str(CACHE)!r})"
    paths = f"import sys; sys.path[:0] = {[str(TESTS), str(TESTS.parent / 'src')]!r}"
    done = subprocess.run(
        [sys.executable, "-c", f"{paths}; {program}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    read: Found = json.loads(done.stdout)
    return read


def allowed(loop: str, what: str, where: str) -> set[int]:
    """Return the steps in which something may synchronise."""
    steps: set[int] = set()
    for loops, kind, place, when, _ in LEFT:
        if loop.startswith(loops) and kind == what and where.startswith(place):
            steps |= POWERS if when is POWER else set(range(max(STEPS, STEPS_OF_RANKS)))
    return steps


@pytest.mark.parametrize("loop", [name for name in (*ALONE, *RANKS) if name != "waits"])
def test_only_what_is_listed_waits_for_the_device(found: Found, loop: str) -> None:
    synchronised, states = found[loop]
    levers = {**ALONE, **RANKS}[loop][0]
    assert {states[name] for name in levers} <= {"applied"}, states
    unlisted = [
        (what, where, steps)
        for what, where, steps in synchronised
        if not set(steps) <= allowed(loop, what, where)
    ]
    assert unlisted == []


def test_bf16_fused_and_compiled_waits_for_nothing(found: Found) -> None:
    assert [found[name][0] for name in ALONE if name.startswith("bf16")] == [[]] * 5


def test_fp16_reads_one_number_in_each_step(found: Found) -> None:
    for loop in [name for name in ALONE if name.startswith("fp16")]:
        steps = {where: at for _, where, at in found[loop][0] if "Tally.read" not in where}
        assert list(steps.values()) == [list(range(STEPS))], loop


def test_each_listed_wait_is_still_there(found: Found) -> None:
    for loops, kind, place, *_ in LEFT:
        names = [name for name in found if name.startswith(loops)]
        seen = [entry for name in names for entry in found[name][0]]
        assert any(what == kind and where.startswith(place) for what, where, _ in seen), place


def test_a_loop_that_waits_is_seen_each_time(found: Found) -> None:
    """It reads, also in its backward pass, copies both ways, asks for shapes, and waits."""
    counts: dict[str, Any] = {what: len(at) / STEPS for what, _, at in found["waits"][0]}
    assert counts == {READ: 3, FROM_DEVICE: 2, FROM_HOST: 3, SHAPE: 3, WAIT: 2}
    assert {where for _, where, _ in found["waits"][0]} == {"the script"}
