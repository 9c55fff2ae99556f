"""The levers in a process of their own: what is imported, drawn, left behind and kept out."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.codec import loads
from fasttrain.model.outcome import RankReport, State
from support.rig import read_report

LEVERS = ("--device", "cpu", "--amp", "bf16", "--optimizer", "fused")

TRAIN = """
import os, random, sys, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def python(fasttrain: Any, path: Path) -> bytes:
    done = subprocess.run(
        [sys.executable, path], capture_output=True, cwd=path.parent, env=fasttrain.environ
    )
    assert done.returncode == 0, done.stderr
    return bytes(done.stdout)


def test_dynamo_is_not_imported_for_levers_that_do_without(fasttrain: Any, script: Any) -> None:
    path = script(
        "import sys, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "print(model(torch.ones(2, 4)).dtype, 'torch._dynamo' in sys.modules)\n"
    )
    done = fasttrain("run", path, *LEVERS)
    assert done.stdout == b"torch.float32 False\n", done.stderr


def test_the_scripts_random_numbers_are_its_own(fasttrain: Any, script: Any) -> None:
    path = script(
        "import random\n"
        "random.seed(0)\n" + TRAIN + "draws = [random.random(), torch.rand(2).tolist()]\n"
        "train(3)\n"
        "print(draws, random.random(), torch.rand(2).tolist(), torch.initial_seed())\n"
    )
    done = fasttrain("run", path, *LEVERS)
    assert done.stdout == python(fasttrain, path), done.stderr


def test_workers_of_a_loader_get_no_levers(fasttrain: Any, script: Any) -> None:
    path = script(
        TRAIN + "from torch.utils.data import DataLoader\n"
        "class Features(torch.utils.data.Dataset):\n"
        "    extractor = torch.nn.Linear(4, 4)\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return self.extractor(torch.full((4,), i / 3)).detach()\n"
        "if __name__ == '__main__':\n"
        "    loader = DataLoader(Features(), batch_size=2, num_workers=1)\n"
        "    print([batch.tolist() for batch in loader])\n"
        "    train(1)\n"
    )
    done = fasttrain("run", path, *LEVERS, "--run-dir", fasttrain.cwd / "run")
    assert done.stdout == python(fasttrain, path), done.stderr
    amp = read_report(fasttrain.cwd / "run").outcomes[0]
    assert (amp.state, amp.counts) == (State.APPLIED, {"forwards": 1})


def test_a_script_that_leaves_by_os_exit_leaves_a_report(fasttrain: Any, script: Any) -> None:
    path = script(TRAIN + "train(3)\nos._exit(7)\n")
    done = fasttrain("run", path, *LEVERS, "--run-dir", fasttrain.cwd / "run")
    assert done.returncode == 7
    report = read_report(fasttrain.cwd / "run")
    assert (report.stats.steps, report.finished) == (1, False)
    assert {o.lever: o.state for o in report.outcomes}["amp"] is State.APPLIED


def test_a_script_that_is_killed_leaves_a_report(fasttrain: Any, script: Any) -> None:
    path = script(TRAIN + "print('ready', flush=True)\ntrain(10**9)\n")
    run_dir = fasttrain.cwd / "run"
    process = fasttrain.start("run", path, *LEVERS, "--run-dir", run_dir, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 120
    while read_report(run_dir).stats.steps == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    report = read_report(run_dir)
    assert report.stats.steps >= 1
    assert report.device == "cpu"


@pytest.mark.slow
def test_the_first_step_may_be_far_away(fasttrain: Any, script: Any) -> None:
    """A worker that dies before any step has told what it was about to do."""
    path = script("import os, torch\nos.abort()\n")
    fasttrain("run", path, *LEVERS, "--run-dir", fasttrain.cwd / "run")
    report = read_report(fasttrain.cwd / "run")
    assert report.stats.steps == 0
    assert report.outcomes[0].state is State.ARMED


FORK_BEFORE_TORCH = """
import os
child = os.fork()
import torch
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(5 if child else 50):
    parameter.sum().backward()
    optimizer.step()
if child:
    os.waitpid(child, 0)
"""


def test_a_child_forked_before_torch_leaves_the_report_to_its_parent(fasttrain, script, tmp_path):
    done = fasttrain("run", script(FORK_BEFORE_TORCH), "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    report = loads(RankReport, (tmp_path / "run" / "rank-0.json").read_bytes())
    assert report.stats.steps == 5
