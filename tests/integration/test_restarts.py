"""Runs on one node that fail and are started again, or are not."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.attempts import SAME_WAY, UNTRAINED
from fasttrain.launch.crash.cause_rules import Retry
from fasttrain.launch.process.supervise import ENDED_LEFT
from fasttrain.model.attempts import used_up
from fasttrain.model.hang import NO_PROGRESS

TWO = ("--nproc-per-node", "2", "--device", "cpu", "--preset", "exact")
ONE = ("--device", "cpu", "--preset", "exact")
# Each word of the command line is what becomes of one attempt, behind so many steps.
TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
again = int(os.environ.get("FASTTRAIN_RESTART_COUNT", "0"))
how, _, steps = sys.argv[1 + again].partition(":")
if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(int(steps or 0)):
    parameter.sum().backward()
    if dist.is_initialized():
        dist.all_reduce(parameter.grad)
    optimizer.step()
print("attempt", again, "of rank", rank, flush=True)
if rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
    if how == "raise":
        raise ValueError("of this script")
    if how == "connection":
        raise ConnectionResetError("by the server")
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        while True:
            time.sleep(1)
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""
# Rank 0 leaves a process behind that has a session of its own.
STRAY = """
import os, signal, subprocess, sys
if os.environ.get("RANK", "0") == "0":
    if "FASTTRAIN_RESTART_COUNT" in os.environ:
        print("stray", os.path.exists("/proc/" + open("stray").read()), flush=True)
    else:
        stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open("stray", "w").write(str(stray.pid))
        os.kill(os.getpid(), signal.SIGKILL)
"""


def receipt(run_dir: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run_dir / "receipt.json").read_text())
    return read


@pytest.mark.parametrize("ranks", [ONE, TWO], ids=["direct", "torchrun"])
def test_what_can_heal_is_tried_again(
    fasttrain: Any, script: Any, only_run_dir: Any, ranks: tuple[str, ...]
) -> None:
    hows = ("connection:1", "crash:2", "well:3")
    done = fasttrain("run", script(TRAIN), *ranks, "--max-restarts", "2", *hows, timeout_s=240)
    told = done.stderr.decode()
    last = ranks is TWO
    assert done.returncode == 0, told
    assert done.stdout.decode().splitlines() == [f"attempt {at} of rank 0" for at in range(3)]
    who = "rank 1, " if last else ""
    assert re.search(rf"\battempt 1 .*: {who}network: .*\b1 of 2\b.*\b2 s\b", told)
    assert re.search(rf"\battempt 2 .*: {who}segfault: .*\b2 of 2\b", told)
    first, second = receipt(only_run_dir())["attempts"]
    assert (first["crash"]["cause"], first["crash"]["step"]) == ("network", 1)
    assert (second["crash"]["cause"], second["crash"]["step"]) == ("segfault", 2)
    # Nothing of an attempt is lost: its records are apart, and its log is divided.
    kept = json.loads((only_run_dir() / first["folder"] / "crash.json").read_text())
    assert kept["error"] == "ConnectionResetError: by the server"
    log = (only_run_dir() / f"rank-{int(last)}.log").read_text()
    before, between, behind = log.split("--- fasttrain: end of attempt ")
    assert "ConnectionResetError" in before
    assert between.startswith("1: network ---\n")
    assert behind.startswith("2: segfault ---\n")


@pytest.mark.parametrize(
    ("hows", "attempts", "why"),
    [
        (("raise",), 0, UNTRAINED),
        (("raise:2", "raise:2", "well"), 1, f"{SAME_WAY} at step 2"),
    ],
)
def test_what_can_not_heal_is_not(
    fasttrain: Any, script: Any, only_run_dir: Any, hows: tuple[str, ...], attempts: int, why: str
) -> None:
    done = fasttrain("run", script(TRAIN), *ONE, "--max-restarts", "2", *hows, timeout_s=240)
    assert done.returncode == 1
    crash = receipt(only_run_dir())["crash"]
    assert why in crash["final"]
    assert crash == json.loads((only_run_dir() / "crash.json").read_text())
    assert len(receipt(only_run_dir())["attempts"]) == attempts
    card = " ".join(done.stderr.decode().split())
    assert crash["final"][:60] in card
    assert (": attempt 1: " in card) is bool(attempts)


def test_a_module_that_is_no_python_is_tried_again_only_if_asked(
    fasttrain: Any, script: Any
) -> None:
    script("x y", "wrong.py")
    path = script("import wrong")
    done = fasttrain("run", path, "--max-restarts", "1")
    assert b" 1 of 1" not in done.stderr
    assert f"syntax: {Retry.NEVER}".encode() in done.stderr
    done = fasttrain("run", path, "--max-restarts", "1", "--restart-on", "any")
    assert re.search(rb"\b1 of 1\b.*\b2 s\b", done.stderr)
    assert used_up(1).encode() in done.stderr
    assert done.returncode == 1


def test_any_command_is_tried_again(fasttrain: Any, only_run_dir: Any) -> None:
    words = ("sh", "-c", 'echo "try $FASTTRAIN_RESTART_COUNT"; [ "$FASTTRAIN_RESTART_COUNT" = 2 ]')
    done = fasttrain("run", "--no-python", "--max-restarts", "2", "--", *words)
    assert (done.returncode, done.stdout) == (0, b"try \ntry 1\ntry 2\n")
    attempts = receipt(only_run_dir())["attempts"]
    assert [attempt["delay_s"] for attempt in attempts] == [2, 4]
    # Neither the wait before nor the look for what it left behind is of the attempt.
    assert all(0 < attempt["wall_s"] < 2 for attempt in attempts)


@pytest.mark.parametrize("ranks", [ONE, TWO], ids=["direct", "torchrun"])
def test_strays_are_gone_before_the_next_attempt(
    fasttrain: Any, script: Any, ranks: tuple[str, ...]
) -> None:
    done = fasttrain("run", script(STRAY), *ranks, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr.decode()
    assert b"stray False\n" in done.stdout
    assert f"{ENDED_LEFT}: sleep".encode() in done.stderr


@pytest.mark.parametrize(
    ("options", "signum", "code"),
    [
        (ONE, signal.SIGTERM, 143),
        (TWO, signal.SIGINT, 130),
        ((*ONE, "--preempt", "snapshot"), signal.SIGUSR2, 85),
    ],
    ids=["direct, SIGTERM", "torchrun, SIGINT", "direct, SIGUSR2"],
)
def test_the_wait_ends_at_once_when_asked(
    fasttrain: Any, script: Any, until: Any, only_run_dir: Any, tmp_path: Path,
    options: tuple[str, ...], signum: Any, code: int,
) -> None:  # fmt: skip
    path, said = script("raise ConnectionError"), tmp_path / "said"
    with said.open("wb") as log:
        words = (*options, "--max-restarts", "8")
        run = fasttrain.start("run", path, *words, stdout=subprocess.DEVNULL, stderr=log)
    until(lambda: re.search(r"\b3 of 8\b.*\b8 s\b", said.read_text()))
    started_s = time.monotonic()
    run.send_signal(signum)
    assert run.wait(120) == code
    assert time.monotonic() - started_s < 7
    if options is not TWO:  # torchrun's agent did
        assert receipt(only_run_dir())["crash"] is None, "none of its processes ran"


def test_a_run_that_hangs_is_killed_and_tried_again(
    fasttrain: Any, script: Any, only_run_dir: Any
) -> None:
    options = (*TWO, "--hang-timeout", "2", "--max-restarts", "2", "hang:2", "well:2")
    done = fasttrain("run", script(TRAIN), *options, timeout_s=240)
    assert done.returncode == 0, done.stderr.decode()
    (attempt,) = receipt(only_run_dir())["attempts"]
    assert attempt["crash"]["cause"] == "hang"
    assert (only_run_dir() / attempt["folder"] / "hang.json").exists()
    assert f"hang: {NO_PROGRESS} for 2 s".encode() in done.stderr


def test_the_same_hang_ends_the_run(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    options = (*ONE, "--hang-timeout", "2", "--max-restarts", "5", *["hang:2"] * 6)
    done = fasttrain("run", script(TRAIN), *options, timeout_s=240)
    assert done.returncode == 75
    assert f"{SAME_WAY} at step 2".encode() in done.stderr
    assert len(receipt(only_run_dir())["attempts"]) == 1
