"""Processes that a script starts by multiprocessing get the levers, and are accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.receipts import in_children

# Two writers on shared weights, as in Hogwild; rank 0 trains 5 steps and rank 1 trains 3.
CHILDREN = """
import sys
import torch
import torch.multiprocessing as mp
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
    def forward(self, x):
        out = self.linear(x)
        seen.append(str(out.dtype))
        return out

seen = []

def train(rank, model):
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5 - 2 * rank):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    print(rank, sorted(set(seen)), flush=True)

def wait(*_):
    pass

if __name__ == "__main__":
    model = Net()
    model.share_memory()
    how = sys.argv[1]
    if how == "mp.spawn":
        mp.spawn(train, args=(model,), nprocs=2)
    else:
        context = mp.get_context(how)
        if "parent trains too" in sys.argv:
            train(1, model)
        workers = [context.Process(target=train, args=(rank, model)) for rank in range(2)]
        workers.append(context.Process(target=wait))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
"""
LEVERS = ("--amp", "bf16", "--optimizer", "auto")


def run(fasttrain: Any, script: Any, *args: str, levers: tuple[str, ...] = LEVERS) -> Any:
    run_dir: Path = fasttrain.cwd / "run"
    path = script(CHILDREN)
    done = fasttrain("run", path, *levers, "--run-dir", run_dir, "--", *args)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads((run_dir / "receipt.json").read_bytes())["ranks"]
    outcomes = {outcome["lever"]: outcome for outcome in rank["outcomes"]}
    return sorted(done.stdout.decode().splitlines()), outcomes, rank


@pytest.mark.parametrize(
    "how", [pytest.param("mp.spawn", marks=pytest.mark.matrix), "spawn", "fork"]
)
def test_children_that_train(fasttrain: Any, script: Any, how: str) -> None:
    told, outcomes, rank = run(fasttrain, script, how)
    assert told == ["0 ['torch.bfloat16']", "1 ['torch.bfloat16']"]
    assert outcomes["amp"]["state"] == outcomes["optimizer"]["state"] == "applied"
    assert outcomes["amp"]["counts"]["forwards"] == 5 + 3
    assert outcomes["optimizer"]["counts"]["steps"] == 5 + 3
    assert in_children(2) in outcomes["amp"]["notes"]
    assert rank["stats"]["steps"] == 5
    assert rank["device"] == "cpu"
    children = list((fasttrain.cwd / "run").glob("rank-0.child-*.json"))
    assert len(children) == 2  # the one that did not train has nothing to tell


def test_a_parent_that_trains_too_is_counted_once(fasttrain: Any, script: Any) -> None:
    _, outcomes, _ = run(fasttrain, script, "fork", "parent trains too")
    assert outcomes["amp"]["counts"]["forwards"] == 3 + 5 + 3
    assert not {in_children(count) for count in (1, 2, 3)} & set(outcomes["amp"]["notes"])


# Both children come to their first call at the same time, with an empty cache.
TOGETHER = """
import multiprocessing, os
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("inductor")
import torch

def train(barrier):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    barrier.wait()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    children = [context.Process(target=train, args=(barrier,)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
"""


def test_one_of_two_children_compiles_what_the_other_loads(fasttrain: Any, script: Any) -> None:
    run_dir: Path = fasttrain.cwd / "run"
    levers = ("--amp", "off", "--compile", "default")
    done = fasttrain("run", script(TOGETHER), *levers, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads((run_dir / "receipt.json").read_bytes())["ranks"]
    (outcome,) = (each for each in rank["outcomes"] if each["lever"] == "compile")
    assert outcome["counts"]["graphs"] == 2
    assert outcome["counts"]["cached graphs"] == 1


# The parent never imports torch: its children are the first to do so.
TORCHLESS = """
import multiprocessing, sys

def train():
    import torch
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=train)
    process.start()
    process.join()
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "how",
    ["forkserver", *(pytest.param(it, marks=pytest.mark.matrix) for it in ("spawn", "fork"))],
)
def test_children_of_a_parent_without_torch(fasttrain: Any, script: Any, how: str) -> None:
    run_dir: Path = fasttrain.cwd / "run"
    done = fasttrain("run", script(TORCHLESS), *LEVERS, "--run-dir", run_dir, "--", how)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads((run_dir / "receipt.json").read_bytes())["ranks"]
    outcomes = {outcome["lever"]: outcome for outcome in rank["outcomes"]}
    assert outcomes["amp"]["state"] == outcomes["optimizer"]["state"] == "applied"
    assert in_children(1) in outcomes["optimizer"]["notes"]
    assert rank["stats"]["steps"] == 3


@pytest.mark.matrix
def test_with_every_lever_off_children_are_pythons_own(fasttrain: Any, script: Any) -> None:
    told, outcomes, _ = run(fasttrain, script, "spawn", levers=("--preset", "exact"))
    assert told == ["0 ['torch.float32']", "1 ['torch.float32']"]
    assert outcomes["amp"]["state"] == "off"


ERROR = """
import multiprocessing
import torch

def fail():
    raise ValueError("on purpose")

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=fail)
    process.start()
    process.join()
"""


def test_a_childs_traceback_is_pythons_own(fasttrain: Any, script: Any) -> None:
    path = script(ERROR)
    done = fasttrain("run", path, *LEVERS, "--quiet")
    plain = subprocess.run(
        [sys.executable, str(path)], env=fasttrain.environ, capture_output=True, timeout=240
    )
    assert b"on purpose" in plain.stderr
    assert done.stderr.startswith(plain.stderr)


SHADOW = "raise RuntimeError('the wrong fasttrain')\n"


@pytest.mark.matrix
def test_something_else_called_fasttrain_is_in_nobodys_way(fasttrain: Any, script: Any) -> None:
    script(SHADOW, "fasttrain.py")
    path = script(CHILDREN)
    # Not with -m, by which the test would meet the wrong one itself.
    command = [str(Path(sys.executable).with_name("fasttrain")), "run", str(path), *LEVERS]
    done = subprocess.run(
        [*command, "--", "spawn"],
        cwd=fasttrain.cwd, env=fasttrain.environ, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert in_children(2).encode() in done.stderr
