"""torch_npu's own fused optimizers, swapped in on a simulated NPU: all ends as without them.

Nothing here has run on a card. The device is one of ``tests/fake_npu``, the optimizers are those of
the wheel, unmodified. The first run fetches the wheel (44 MB) and compiles the device (a minute).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_npu.swap_loops import LOOPS, MAKERS, MIDDLE, STEPS

FAKE_NPU = Path(__file__).parents[1] / "fake_npu"

EVERY_STEP = STEPS - 1  # the first one is the script's own: it makes the state
# Loops in which the script's own optimizer makes more steps than the first, and those it makes.
OWN_STEPS = {
    "rollback": 1 - 4,  # four steps more in all
    "cpu-and-back": 1,
    "unfrozen-late": 6,
    "frozen-midway": 1,
    "group-added": 1,
    "weights-averaged": 6,
    "settings-changed": 6,
    "state-reset": 1,
    "steps-set": 1,
    "GradScaler": 2,  # overflow: no step at all
    "npu.GradScaler": 2,
    "outlived": 1 - 3,  # another optimizer's steps are counted too
    "resume-native": MIDDLE,
    "resume-swapped": MIDDLE - 1,
}


@pytest.fixture(scope="session")
def results(wheel: Path) -> dict[str, Any]:
    """Run all trials in a process of their own: a device can be renamed once in each."""
    done = subprocess.run(
        [sys.executable, "-B", FAKE_NPU / "swap_trials.py", wheel, wheel.parents[1]],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def result(results: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = results[name]
    assert "error" not in found, found["error"]
    return found


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("loop", [*LOOPS, "resume-native", "resume-swapped"])
def test_a_swapped_loop_ends_as_the_scripts_own(
    results: dict[str, Any], loop: str, maker: str
) -> None:
    found = result(results, f"{loop} {maker}")
    assert found["excess"] <= 1
    assert found["state"] == "applied"
    expected = EVERY_STEP - OWN_STEPS.get(loop, 0)
    # SGD counts no steps, so that more can be mended, and without momentum has no state at all.
    assert found["steps"] == expected or (maker.startswith("sgd") and found["steps"] > expected)


@pytest.mark.parametrize("loop", ["model.zero_grad", "rollback", "scheduler"])
def test_lamb_keeps_its_norms_too(results: dict[str, Any], loop: str) -> None:
    found = result(results, f"{loop} lamb")
    assert (found["excess"] <= 1, found["state"]) == (True, "applied"), found
    assert found["steps"] == EVERY_STEP - OWN_STEPS.get(loop, 0)


def test_a_kernel_that_computes_something_else_is_not_trusted(results: dict[str, Any]) -> None:
    found = result(results, "wrong-kernel")
    assert (found["excess"], found["state"], found["steps"]) == (0, "skipped", 0)
    assert "ValueError: " in found["reason"]


def test_a_failure_while_swapping_leaves_the_script_its_own(results: dict[str, Any]) -> None:
    found = result(results, "no-memory")
    assert (found["excess"], found["state"], found["steps"]) == (0, "skipped", 0)
    assert "out of memory" in found["reason"]


def test_hooks_see_the_scripts_optimizer_alone(results: dict[str, Any]) -> None:
    found = result(results, "hooks")
    assert found["state"] == "applied"
    assert found["seen"] == {"Adam": 2 * STEPS, "any Adam": STEPS}


def test_unguarded_the_fused_optimizer_does_train_wrong(results: dict[str, Any]) -> None:
    """The danger is real on the simulated device: else the tests above would show nothing."""
    assert result(results, "unguarded")["excess"] > 1000
