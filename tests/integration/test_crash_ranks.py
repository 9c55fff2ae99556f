"""Which of several ranks failed first, under the real agent, and what the screen shows of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.crash.judge import LOST, WAS_STOPPED

TWO = ("--nproc-per-node", "2", "--device", "cpu")

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
    assert f"fasttrain: rank {rank} " in done.stderr.decode()
    if how == "late":
        assert "all_reduce" in crash["why"]
        assert "2000ms" in crash["why"]
        assert crash["others"] == f"rank 0 {WAS_STOPPED}"
    else:
        assert crash["others"] in (
            f"rank 1 {LOST}", f"rank 1 {WAS_STOPPED}"
        )  # fmt: skip


# Rank 1 fails, leaves its group, and still has something to do; rank 0 notices, and ends at once.
SLOWLY = """
import logging, os, sys, time, torch, torch.distributed as dist
says, rank = sys.argv[1], int(os.environ["RANK"])
logging.getLogger().addHandler(logging.StreamHandler())
try:
    {}["told by both"]
except KeyError:
    logging.exception("going on without it")
dist.init_process_group("gloo")
try:
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        {}["weights"]
    dist.all_reduce(torch.ones(4))
except Exception as error:
    logging.exception("failed") if says == "all" else print("failed:", error, flush=True)
    dist.destroy_process_group()
    if rank == 1:
        print("closing the logger", flush=True)
        time.sleep(60)
    raise
"""


@pytest.mark.parametrize(
    ("says", "rank", "cause", "others"),
    [
        ("all", 1, "exception", f"rank 0 {LOST}"),
        # Nothing tells why, nor when: its last word must do.
        (
            "little", 0, "peer-lost",
            f"rank 1 {WAS_STOPPED}; .*\\brank 1\\b.*: closing the logger",
        ),
    ],
)  # fmt: skip
def test_one_that_fails_and_takes_its_time_to_end(
    fasttrain: Any, script: Any, only_run_dir: Any, says: str, rank: int, cause: str, others: str
) -> None:
    done = fasttrain("run", script(SLOWLY), *TWO, says)
    crash = json.loads((only_run_dir() / "crash.json").read_text())
    assert (crash["rank"], crash["cause"]) == (rank, cause)
    assert re.fullmatch(others, crash["others"])
    assert done.returncode == crash["exit_code"] == 1
    if rank == 1:
        assert crash["error"] == "KeyError: 'weights'"
        assert [frame["line"] for frame in crash["frames"]] == [13]


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
    said, _, card = done.stderr.decode().partition("fasttrain: rank 1 ")
    card, _, receipt = card.partition("\nfasttrain: ")
    assert "exit code" not in said, "the cause stands in front of the receipt"
    assert re.search(r"train\.py .*\bexit code 1\b", receipt)
    for part in (
        "exit code 1        [file-missing]", "train.py:8 in <module>: load()",
        "train.py:6 in load", "FileNotFoundError: [Errno 2]", " no-such-file",
        f"rank 0 {WAS_STOPPED}", "rank-1.log", "| said by 1",
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
    assert process.wait(120) == 128 + signal.SIGTERM
    assert not (only_run_dir() / "crash.json").exists()


def test_a_pasted_plan_tells_its_failure_itself(fasttrain: Any, script: Any) -> None:
    planned = fasttrain("run", script(FAILS), *TWO, "--dry-run")
    done = subprocess.run(
        ["sh"], input=planned.stdout, capture_output=True, timeout=240,
        env={**fasttrain.environ, "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 1, shlex.quote(done.stderr.decode())
    assert re.search(rb"fasttrain: rank 1 .*\bexit code 1\b", done.stderr)
    assert b"closing signal SIGTERM" in done.stderr
