"""Which of two ranks failed first, told of ranks that fail at different times, many times over."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.files import load
from fasttrain.launch.crash.evidence import FailedRun
from fasttrain.launch.crash.judge import judge
from fasttrain.model.codec import loads
from fasttrain.model.crash import EXITS_FILE, Surroundings, WorkerExits
from fasttrain.model.plan import LaunchPlan

pytestmark = pytest.mark.faults

AGENTS = Path(__file__).parent / "programs" / "agents.py"
TWO = ("--nproc-per-node", "2", "--device", "cpu")
SEED = 7
GROUP = 10  # crashes whose agents are forks of one process
CRASHES = {"few": 10, "full": 50}

# Both ranks agree on a time, and each fails at its own distance from it. What time it was then
# stands in `failed-RANK`: sleep() may take longer on a busy machine.
STAGGERED = """
import os, signal, sys, time
rank, folder = int(os.environ["RANK"]), os.path.dirname(__file__)
how, after_ms = sys.argv[1 + rank].split(":")
open(f"{folder}/ready-{rank}", "w").close()
while not all(os.path.exists(f"{folder}/ready-{one}") for one in (0, 1)):
    time.sleep(0.001)
if rank == 0:
    with open(f"{folder}/draft", "w") as draft:
        draft.write(str(time.time() + 0.05))
    os.rename(f"{folder}/draft", f"{folder}/start")
while not os.path.exists(f"{folder}/start"):
    time.sleep(0.001)
time.sleep(max(0, float(open(f"{folder}/start").read()) + int(after_ms) / 1000 - time.time()))
if rank == 1:  # its time of day is set back by an hour now
    time.time_ns = lambda set_ns=time.time_ns() - 3_600_000_000_000: set_ns
with open(f"{folder}/failed-{rank}", "w") as failed:
    failed.write(str(time.monotonic_ns()))
if how == "raise":
    raise ValueError(f"of rank {rank}")
if how == "exit":
    sys.exit(20 + rank)
if how == "leave":
    os._exit(40 + rank)
os.kill(os.getpid(), signal.SIGKILL)
"""
ENDS = {"raise": lambda rank: 1, "exit": lambda rank: 20 + rank,
        "leave": lambda rank: 40 + rank, "kill": lambda rank: 137}  # fmt: skip
# The kernel has to take a process down before its end shows; an exception is told by itself.
SHORTEST_MS = {"raise": 2, "exit": 2, "leave": 40, "kill": 40}


def delays(draw: random.Random, index: int) -> tuple[str, str]:
    """Return how each rank fails, and after how many milliseconds.

    The ranks are first in turns; every other time the second fails before torchrun, which looks
    ten times a second, can have noticed the first.
    """
    hows = [draw.choice(list(ENDS)) for _ in range(2)]
    first = index // 2 % 2
    late_ms = draw.randint(SHORTEST_MS[hows[first]], 200 if index % 2 else 80)
    one, other = (f"{hows[rank]}:{0 if rank == first else late_ms}" for rank in range(2))
    return one, other


def planned(fasttrain: Any, folder: Path, pairs: list[tuple[str, str]]) -> list[LaunchPlan]:
    """Have fasttrain plan one run of two ranks, and make a run in a folder of its own of each pair.

    Planning takes longer than failing does, and all that differs is the folder and the arguments.
    """
    model = folder / "model"
    model.mkdir()
    (model / "train.py").write_text(STAGGERED)
    options = (*TWO, "--run-dir", model / "run", "--dry-run", "--json")
    said = fasttrain("run", model / "train.py", *options, "--", "how-0", "how-1").stdout
    text = json.dumps(json.loads(said)["data"])
    plans = []
    for index, (first, second) in enumerate(pairs):
        run_dir = folder / str(index) / "run"
        run_dir.mkdir(parents=True)
        (folder / str(index) / "train.py").write_text(STAGGERED)
        own = text.replace(str(model), str(folder / str(index)))
        own = own.replace("how-0", first).replace("how-1", second)
        (run_dir / "plan.json").write_text(own)
        (run_dir / "rank-0.log").touch()  # as a launcher would
        plans.append(loads(LaunchPlan, own))
    return plans


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each group of crashes."""
    if "start" in metafunc.fixturenames:
        crashes = CRASHES[metafunc.config.getoption("rounds")]
        metafunc.parametrize("start", range(0, crashes, GROUP))


def test_the_first_of_two_that_fail_at_different_times(
    fasttrain: Any, tmp_path: Path, start: int, record_property: Any
) -> None:
    draw = random.Random(f"{SEED}-{start}")
    words = [delays(draw, index) for index in range(GROUP)]
    plans = planned(fasttrain, tmp_path, words)
    (tmp_path / "agents.json").write_text(json.dumps([plan.argv for plan in plans]))
    subprocess.run(
        [sys.executable, str(AGENTS), str(tmp_path / "agents.json")],
        capture_output=True, timeout=200, check=True, env=fasttrain.environ,
    )  # fmt: skip
    wrong = []
    for index, (plan, pair) in enumerate(zip(plans, words, strict=True)):
        first, times = really_first(tmp_path / str(index))
        how = pair[first].partition(":")[0]
        exits = load(WorkerExits, Path(plan.run_dir, EXITS_FILE))
        none = Surroundings()
        crash, _ = judge(FailedRun(plan, plan, {}, 1, none, none, frozenset(), exits=exits))
        right = crash and (crash.rank, crash.exit_code) == (first, ENDS[how](first))
        row = (
            "staggered crashes",
            f"first by {how}",
            f"rank {first}",
            "right" if right else "WRONG",
        )
        record_property("table", row)
        if not right:
            wrong.append((pair, times, crash))
    assert not wrong


def really_first(folder: Path) -> tuple[int, dict[int, int]]:
    """Return the rank that failed first, and when each did, as they wrote it down themselves."""
    failed = {rank: folder / f"failed-{rank}" for rank in (0, 1)}
    times = {rank: int(path.read_text()) for rank, path in failed.items() if path.exists()}
    return min(times, key=times.__getitem__), times
