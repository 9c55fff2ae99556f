"""Which of several ranks failed first, under the real agent, and what the screen shows of it."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.crash import Scene, investigate
from fasttrain.spec.codec import loads
from fasttrain.spec.crash import Surroundings
from fasttrain.spec.plan import LaunchPlan

AGENTS = Path(__file__).parent / "crashes" / "agents.py"
TWO = ("--nproc-per-node", "2", "--device", "cpu")
CRASHES, SEED = 20, 7

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
with open(f"{folder}/failed-{rank}", "w") as failed:
    failed.write(str(time.time_ns()))
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
    """Give how each rank fails, and after how many milliseconds.

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


def test_the_first_of_two_that_fail_at_different_times(fasttrain: Any, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    words = [delays(draw, index) for index in range(CRASHES)]
    plans = planned(fasttrain, tmp_path, words)
    (tmp_path / "agents.json").write_text(json.dumps([plan.argv for plan in plans]))
    subprocess.run(
        [sys.executable, str(AGENTS), str(tmp_path / "agents.json")],
        capture_output=True, timeout=120, check=True, env=fasttrain.environ,
    )  # fmt: skip
    wrong = []
    for index, (plan, pair) in enumerate(zip(plans, words, strict=True)):
        scene = Scene(plan, plan, {}, 1, Surroundings(), Surroundings(), frozenset())
        crash, _ = investigate(scene)
        times = {
            rank: int((tmp_path / str(index) / f"failed-{rank}").read_text())
            for rank in (0, 1)
            if (tmp_path / str(index) / f"failed-{rank}").exists()
        }
        first = min(times, key=times.__getitem__)
        how = pair[first].partition(":")[0]
        if crash is None or (crash.rank, crash.exit_code) != (first, ENDS[how](first)):
            wrong.append((pair, times, crash))
    assert not wrong


# Rank 0 goes in one of several ways, in the middle of a collective of rank 1.
PEERS = """
import datetime, os, sys, time, torch, torch.distributed as dist
how, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2 if how == "late" else 60))
total = torch.ones(4)
dist.all_reduce(total)
if rank == 0:
    how == "kill" and os.kill(os.getpid(), 9)
    if how == "raise":
        raise ValueError("of rank 0")
    time.sleep(30)
dist.all_reduce(total)
"""


@pytest.mark.parametrize(
    ("how", "rank", "code", "cause"),
    [
        ("raise", 0, 1, "exception"),
        ("kill", 0, 137, "killed"),
        ("late", 1, 1, "collective-timeout"),
    ],
)
def test_a_rank_that_lost_its_peer_is_not_the_first(
    fasttrain: Any, script: Any, only_run_dir: Any, how: str, rank: int, code: int, cause: str
) -> None:
    done = fasttrain("run", script(PEERS), *TWO, "--show-ranks", "1", how)
    crash = json.loads((only_run_dir() / "crash.json").read_text())
    assert (crash["rank"], crash["cause"]) == (rank, cause), crash
    assert done.returncode == crash["exit_code"] == code
    assert f"rank {rank} failed first" in done.stderr.decode()
    if how == "late":
        assert "all_reduce" in crash["why"]
        assert "2000ms" in crash["why"]
        assert crash["others"] == "rank 0 was stopped"
    else:
        assert crash["others"] in (
            "rank 1 lost the connection, a consequence", "rank 1 was stopped"
        )  # fmt: skip


FAILS = """
import os, sys, time
rank = os.environ["RANK"]
print("said by", rank, flush=True)
def load():
    open("no-such-file")
if rank == "1":
    load()
time.sleep(60)
"""


def test_a_hidden_rank_is_told_whole(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    done = fasttrain("run", script(FAILS), *TWO)
    assert done.returncode == 1
    card = done.stderr.decode().partition("fasttrain: rank 1 failed first")[2]
    for part in (
        "with exit code 1        [file-missing]", "train.py:8 in <module>: load()",
        "train.py:6 in load", "FileNotFoundError: [Errno 2]", "why: there is no no-such-file",
        "also: rank 0 was stopped", "rank-1.log", "| said by 1",
    ):  # fmt: skip
        assert part in card
    assert max(map(len, card.splitlines()[1:])) <= 80
    # The agent's own account is kept apart from the script's output.
    assert b"torch/distributed" not in done.stderr + (only_run_dir() / "rank-0.log").read_bytes()
    assert "closing signal SIGTERM" in (only_run_dir() / "agent.log").read_text()


def test_quiet_tells_several_in_three_lines(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script(FAILS), *TWO, "--quiet")
    told = done.stderr.decode().splitlines()
    assert len(told) == 3
    assert [line.split(":")[0].strip() for line in told] == ["fasttrain", "why", "fix"]


def test_a_run_that_is_stopped_has_not_crashed(
    fasttrain: Any, script: Any, until: Any, only_run_dir: Any, tmp_path: Path
) -> None:
    path = script(
        "import os, time\nopen(f'ready-{os.environ[\"RANK\"]}', 'w').close()\ntime.sleep(60)"
    )
    quietly = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = fasttrain.start("run", path, *TWO, **quietly)
    until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not (only_run_dir() / "crash.json").exists()


def test_a_pasted_plan_tells_its_failure_itself(fasttrain: Any, script: Any) -> None:
    planned = fasttrain("run", script(FAILS), *TWO, "--dry-run")
    done = subprocess.run(
        ["sh"], input=planned.stdout, capture_output=True, timeout=60,
        env={**fasttrain.environ, "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 1, shlex.quote(done.stderr.decode())
    assert b"fasttrain: rank 1 failed first, with exit code 1" in done.stderr
    assert b"closing signal SIGTERM" in done.stderr
