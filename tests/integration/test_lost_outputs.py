"""Terminals, readers and disks that go away while a run goes on, and don't end the script."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.signal_records import records

TWO = ("--nproc-per-node", "2", "--device", "cpu", "--strategy", "none")
# An event comes every half second, and the line of progress with it.
TRAIN = """
import sys, time, torch
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)

def train(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        time.sleep(0.02)
"""
SAVES = f"""{TRAIN}
import signal
stop = []
signal.signal(signal.SIGHUP, lambda *_: stop.append(1))
while not stop:
    train(0.05)
train(1.5)
open("saved", "w").close()
sys.exit(7)
"""
GOES_ON = f"""{TRAIN}
train(1)
print("half", flush=True)
train(1.5)
print("all", flush=True)
"""
RECORDS = records(0)
# Rank 1 prints a line when it is told that the reader has gone, and more than a pipe holds.
PRINTS = """
import os, time
if os.environ["RANK"] == "1":
    print("first", flush=True)
    while not os.path.exists("gone"):
        time.sleep(0.02)
    for number in range(1000):
        print("line", number, "x" * 100, flush=True)
    time.sleep(1)
"""


def test_a_terminal_that_goes_away_leaves_time_to_save(
    fasttrain: Any, script: Any, terminal: Any, only_run_dir: Any, tmp_path: Path
) -> None:
    screen = terminal(fasttrain.argv("run", script(SAVES), "--amp", "off"))
    screen.read_until(b"fasttrain: step ")
    screen.hang_up()
    assert screen.process.wait(120) == 7
    assert (tmp_path / "saved").exists()
    assert json.loads((only_run_dir() / "receipt.json").read_text())["exit_code"] == 7


def test_the_progress_of_a_terminal_that_is_gone_is_not_the_scripts(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    """As of a job in the background whose shell is left: stdout goes to a file."""
    ours, theirs = pty.openpty()
    with (tmp_path / "out").open("wb") as out:
        process = fasttrain.start("run", script(GOES_ON), "--amp", "off", stdout=out, stderr=theirs)
    os.close(theirs)
    screen = b""
    while b"fasttrain: step " not in screen:
        screen += os.read(ours, 65536)
    os.close(ours)
    assert process.wait(120) == 0
    assert (tmp_path / "out").read_bytes() == b"half\nall\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_that_goes_away_is_heard_once_by_each_rank(
    fasttrain: Any, script: Any, terminal: Any, until: Any, tmp_path: Path, ranks: int
) -> None:
    """The kernel tells the leader of the session alone: here the launcher, as under ``ssh -t``."""
    options = TWO if ranks == 2 else ()
    screen = terminal(fasttrain.argv("run", script(RECORDS), "--quiet", *options))
    until(lambda: len(list(tmp_path.glob("ready-*"))) == ranks)
    screen.hang_up()
    # Of several ranks it is torchrun's agent that the signal ends.
    assert screen.process.wait(120) == (0 if ranks == 1 else 128 + signal.SIGHUP)
    seen = [(tmp_path / f"seen-{rank}").read_text() for rank in range(ranks)]
    assert seen == ["SIGHUP\n"] * ranks


def test_a_reader_of_other_ranks_that_goes_away_ends_nobody(
    fasttrain: Any, script: Any, only_run_dir: Any, tmp_path: Path
) -> None:
    options = (*TWO, "--show-ranks", "1")
    with fasttrain.start(
        "run", script(PRINTS), *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"[rank 1] first\n"
        process.stdout.close()
        (tmp_path / "gone").touch()
        told = process.stderr.read().decode()
        assert process.wait(120) == 0, told
    assert len(re.findall(r"\bstdout\b.*Broken pipe", told)) == 1
    assert (only_run_dir() / "rank-1.log").read_bytes().count(b"\n") == 1001


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("how", ["full disk", "no reader", "no reader of either"])
def test_the_exit_code_is_the_scripts_whoever_reads_the_receipt(
    fasttrain: Any, script: Any, only_run_dir: Any, code: int, how: str
) -> None:
    read, written = os.pipe() if how != "full disk" else (-1, os.open("/dev/full", os.O_WRONLY))
    if read >= 0:
        os.close(read)
    stdout = written if how == "no reader of either" else subprocess.DEVNULL
    path = script(f"raise SystemExit({code})")
    process = fasttrain.start("run", path, stdout=stdout, stderr=written)
    os.close(written)
    assert process.wait(120) == code
    assert (only_run_dir() / "receipt.json").exists()


def test_an_answer_that_nobody_takes(fasttrain: Any, script: Any) -> None:
    words = ("run", script("print(1)"), "--dry-run")
    read, written = os.pipe()
    os.close(read)
    gone = fasttrain.start(*words, stdout=written, stderr=subprocess.PIPE)
    os.close(written)
    assert (gone.communicate(timeout=240)[1], gone.returncode) == (b"", 0)
    with Path("/dev/full").open("wb") as full:
        lost = fasttrain.start(*words, stdout=full, stderr=subprocess.PIPE)
    told = lost.communicate(timeout=240)[1]
    assert lost.returncode == 69
    assert told.rstrip().endswith(b"[stdout]")
    assert told.count(b"\n") == 3
