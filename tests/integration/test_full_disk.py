"""A disk that fills up while a run goes on: a small tmpfs, which needs root to mount."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.crash.cause_rules import Retry
from fasttrain.model.codec import loads
from fasttrain.model.outcome import RankReport, Receipt

# Both ranks print and train while rank 0 has filled the disk, to the end or until it makes room.
FILLS = """
import os, sys, time, torch

disk, until = sys.argv[1:]
rank = os.environ["RANK"]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    for _ in range(7):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.1)  # an event comes every half second

def meet(name):
    rank == "0" and open(name, "w").close()
    while not os.path.exists(name):
        time.sleep(0.02)

def fill():
    with open(f"{disk}/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

train()
if rank == "0":
    torch.save(torch.zeros(50_000), f"{disk}/step-1.pt")
    fill()
    try:
        torch.save(torch.zeros(50_000), f"{disk}/step-2.pt")
    except RuntimeError:
        print("not saved")
meet("full")
for number in range(100):
    print("line", number, "x" * 100, flush=True)
    print("error", number, "x" * 100, file=sys.stderr)
train()
if until == "emptied":
    rank == "0" and os.unlink(f"{disk}/filler")
    meet("emptied")
    train()
print("the end of", rank)
"""


# Fills the disk, or uses up its files, on each rank, and then fails in one of two ways.
FAILS = """
import os, sys
disk, what, how = sys.argv[1:]
print("x" * 5000, flush=True)
try:
    with open(f"{disk}/filler-{os.getpid()}", "wb", buffering=0) as file:
        while what == "bytes":
            file.write(bytes(4096))
    number = 0
    while True:
        number += 1
        os.mkdir(f"{disk}/{os.getpid()}-{number}")
except OSError as error:
    how == "raise" or os.kill(os.getpid(), 9)
    raise RuntimeError("no checkpoint") from error
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k,mode=755", "none", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs can't be mounted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def run(fasttrain: Any, script: Any, disk: Path, until: str) -> subprocess.CompletedProcess[bytes]:
    done: subprocess.CompletedProcess[bytes] = fasttrain(
        "run", script(FILLS), "--device", "cpu", "--nproc-per-node", "2", "--strategy", "none",
        "--amp", "off", "--run-dir", disk / "run", "--", disk, until,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert lines[0] == "not saved"
    assert lines[-1] == "the end of 0"
    assert len(lines) == 102
    return done


def test_what_had_no_room_is_missing_and_the_rest_is_whole(
    fasttrain: Any, script: Any, disk: Path
) -> None:
    done = run(fasttrain, script, disk, "emptied")
    told = done.stderr.decode()
    assert f" {disk}/run" in told.splitlines()[0], "before anything was started"
    assert f"fasttrain: warning: {disk}/step-2.pt " in told
    for rank in (0, 1):
        lines = (disk / "run" / f"events-{rank}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines if line]
        assert events[-1]["step"] == 21
        report = loads(RankReport, (disk / "run" / f"rank-{rank}.json").read_bytes())
        assert (report.stats.steps, report.finished) == (21, True)
    log = (disk / "run" / "rank-1.log").read_text()
    assert log.endswith("the end of 1\n")
    assert "line 99" not in log
    receipt = loads(Receipt, (disk / "run" / "receipt.json").read_bytes())
    assert any(f"{disk}/step-2.pt " in warning for warning in receipt.warnings)
    assert any("No space left" in warning for warning in receipt.warnings)
    assert not list((disk / "run").glob("*.tmp"))


def test_a_disk_that_stays_full_takes_no_more_than_lines(
    fasttrain: Any, script: Any, disk: Path
) -> None:
    run(fasttrain, script, disk, "the end")
    # What was kept for records of a failure takes those of the end.
    assert not list((disk / "run").glob("*.tmp"))
    assert (disk / "run" / "receipt.json").exists()
    for path in (disk / "run").glob("*.json"):
        json.loads(path.read_bytes())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("what", "how", "code", "cause", "final"),
    [
        ("bytes", "raise", 1, "disk-full", f"disk-full: {Retry.NEVER}"),
        # One that can heal, but whose records can't be put into a folder of their own.
        ("files", "kill", 137, "killed", "No space left on device"),
    ],
)
def test_a_run_that_fills_its_own_disk_tells_of_it(
    fasttrain: Any, script: Any, disk: Path, ranks: int, what: str, how: str, code: int,
    cause: str, final: str,
) -> None:  # fmt: skip
    subprocess.run(["mount", "-o", "remount,nr_inodes=50", disk], check=True)
    done = fasttrain(
        "run", script(FAILS), "--device", "cpu", "--nproc-per-node", str(ranks), "--strategy",
        "none", "--max-restarts", "1", "--run-dir", disk / "run", "--", disk, what, how,
    )  # fmt: skip
    assert done.returncode == code, done.stderr.decode()
    assert f"[{cause}]" in done.stderr.decode()
    crash = json.loads((disk / "run" / "crash.json").read_text())
    assert (crash["cause"], crash["exit_code"]) == (cause, code)
    assert final in crash["final"]
    assert not list((disk / "run").glob("*.tmp"))


# Stands in for a disk with no room for what torchrun makes for each attempt.
BLOCKS = """
import os, pathlib, sys
for folder in pathlib.Path(sys.argv[1], "torchrun").iterdir():
    (folder / "attempt_1").touch()
os.kill(os.getpid(), 9)
"""


def test_a_restart_without_room_ends_with_the_failure_before_it(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    done = fasttrain(
        "run", script(BLOCKS), "--device", "cpu", "--nproc-per-node", "2", "--strategy", "none",
        "--max-restarts", "1", "--run-dir", run_dir, "--", run_dir,
    )  # fmt: skip
    told = done.stderr.decode()
    assert done.returncode == 137, told
    assert "Traceback" not in told
    assert "[killed]" in told
    crash = json.loads((run_dir / "crash.json").read_text())
    assert (crash["cause"], crash["earlier"]) == ("killed", "attempt 1: killed")
    assert "attempt 2 can't be started: [Errno 17] File exists" in crash["final"]
