"""A run that diverges for real is warned of, or stopped at its step and parameter."""

from __future__ import annotations

import re
from typing import Any

import pytest

# The learning rate is so high that each step overshoots further than the one before.
DIVERGES = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
sgd = torch.optim.SGD(model.parameters(), lr=10.0)
first = None
for step, x in enumerate(torch.utils.data.DataLoader(torch.randn(800, 4), batch_size=4), 1):
    loss = (model(x) - 3).square().mean()
    sgd.zero_grad()
    loss.backward()
    if first is None and not all(p.grad.isfinite().all() for p in model.parameters()):
        first = step
        print("first at", step, flush=True)
    sgd.step()
print("ended")
"""
OPTIONS = ("--device", "cpu", "--amp", "off")


def first_step(text: bytes, pattern: bytes) -> int:
    found = re.search(pattern, text)
    assert found, text.decode()
    return int(found[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_diverging_run_is_stopped(fasttrain: Any, script: Any, ranks: int) -> None:
    several = ("--nproc-per-node", ranks) if ranks > 1 else ()
    done = fasttrain("run", script(DIVERGES), *OPTIONS, *several, "--on-nan", "stop")
    assert done.returncode == 65
    assert b"ended" not in done.stdout
    stopped = first_step(done.stderr, rb"NaN.* step (\d+)")
    assert stopped == first_step(done.stdout, rb"first at (\d+)")
    assert b"Sequential: 0.weight" in done.stderr
    assert b"[not-finite]" in done.stderr


def test_a_diverging_run_is_warned_of(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script(DIVERGES), *OPTIONS)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, b"ended")
    warnings = [line for line in done.stderr.splitlines() if re.search(rb"NaN.* step \d", line)]
    assert len(warnings) == 2, "once at the time, and once with the receipt"
    assert re.search(rb"warning: rank 0: .*\bSGD\b", warnings[1])


def test_off(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script(DIVERGES), *OPTIONS, "--on-nan", "off")
    assert done.returncode == 0
    assert b"NaN" not in done.stderr


def test_a_loss_with_finite_gradients(fasttrain: Any, script: Any) -> None:
    path = script(DIVERGES.replace("lr=10.0", "lr=0.1").replace(".mean()", ".mean() + torch.inf"))
    done = fasttrain("run", path, *OPTIONS, "--on-nan", "stop")
    assert done.returncode == 65
    assert b"first at" not in done.stdout, "no gradient was inf"
    assert re.search(rb"\bloss\b.* train\.py:10 .* step 1\n", done.stderr)
