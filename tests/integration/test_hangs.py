"""A run that hangs is noticed, told with the place of every process, and ended."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.model.codec import loads
from fasttrain.model.errors import ExitCode
from fasttrain.model.hang import NO_PROGRESS, Hang

MODEL = """
import ctypes, os, sys, time, torch
model = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    for _ in range(steps):
        model(torch.ones(4, 2)).sum().backward()
        sgd.step()
"""
TWO_RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
train(2)
if dist.get_rank() == 0:
    time.sleep(100)
dist.all_reduce(torch.ones(1))
"""
LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 30:
            time.sleep(100)
        return torch.ones(2)

for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2):
    model(batch).sum().backward()
    sgd.step()
"""
# PyDLL keeps the interpreter's lock: no other thread of the script can run.
LOCKED = "train(2)\nheld = ctypes.PyDLL(None)\nwhile True:\n    held.sleep(100)\n"
SIGNAL_PROOF = """
import signal
signal.signal(signal.SIGTERM, lambda *_: open("told", "w").close())
train(2)
while not os.path.exists("told"):
    time.sleep(0.05)
sys.exit(7)
"""
QUIETLY = ("--device", "cpu", "--amp", "off", "--hang-timeout", "2")


@pytest.fixture
def hang(only_run_dir: Any) -> Any:
    """Read hang.json of the only run."""
    return lambda: loads(Hang, (only_run_dir() / "hang.json").read_bytes())


def test_one_rank_sleeps_while_the_other_waits(fasttrain: Any, script: Any, hang: Any) -> None:
    path = script(MODEL + TWO_RANKS)
    done = fasttrain("run", path, *QUIETLY, "--nproc-per-node", "2", "--show-ranks", "all")
    assert done.returncode == ExitCode.HUNG
    told = hang()
    waits, sleeps = told.verdict
    assert re.fullmatch(r"rank 1 .*\ball_reduce\b.*\btrain\.py:16\b.*", waits)
    assert re.fullmatch(r"rank 0 .*\btrain\.py:15 in <module>: time\.sleep\(100\)", sleeps)
    assert [(rank.rank, rank.steps) for rank in told.ranks] == [(0, 2), (1, 2)]
    screen = done.stderr.decode()
    assert waits in screen
    card = screen.partition(NO_PROGRESS)[2].partition("hang.json")[0]
    assert max(map(len, card.splitlines()[1:-1])) <= 80
    (process,) = (rank.processes[0] for rank in told.ranks if rank.rank == 1)
    assert not psutil.pid_exists(process.pid)


def test_a_loader_worker_hangs(fasttrain: Any, script: Any, hang: Any) -> None:
    done = fasttrain("run", script(MODEL + LOADER), *QUIETLY)
    assert done.returncode == ExitCode.HUNG
    told = hang()
    waits, reads = told.verdict
    (stuck, _) = (process for process in told.ranks[0].processes if process.role != "rank")
    assert re.fullmatch(r"rank 0 .*\bDataLoader\b.*\btrain\.py:19\b.*", waits)
    place = r"\btrain\.py:16 in __getitem__: time\.sleep\(100\)"
    assert re.fullmatch(rf"DataLoader worker \d+ .*\brank 0\b.*{place}", reads)
    assert stuck.role == "loader worker"


@pytest.mark.parametrize(
    ("ends", "place"),
    [
        ("train(2)\nwhile True:\n    pass\n", "train.py:1"),
        (LOCKED, "train.py:13 in <module>: held.sleep(100)"),
    ],
    ids=["endless loop", "C call with the lock"],
)
def test_a_single_process(
    fasttrain: Any, script: Any, hang: Any, ends: str, place: str, tmp_path: Path
) -> None:
    done = fasttrain("run", script(MODEL + ends), *QUIETLY, "--quiet")
    assert done.returncode == ExitCode.HUNG
    line = hang().verdict[0]
    assert re.match(rf"rank 0 .*{re.escape(place)}", line)
    assert NO_PROGRESS.encode() in done.stderr, "what ends a run is told even quietly"
    report = fasttrain("report")
    assert line[:60] in report.stderr.decode()


def test_the_script_may_save_before_it_is_ended(fasttrain: Any, script: Any, hang: Any) -> None:
    done = fasttrain("run", script(MODEL + SIGNAL_PROOF), *QUIETLY)
    assert done.returncode == ExitCode.HUNG, "whatever the script then ends with"
    assert hang().action == "stop"


def test_a_report_goes_on(fasttrain: Any, script: Any, hang: Any) -> None:
    path = script(MODEL + "train(2)\ntime.sleep(5)\ntrain(1)\nprint('trained')\n")
    done = fasttrain("run", path, *QUIETLY, "--on-hang", "report")
    assert (done.returncode, done.stdout) == (0, b"trained\n")
    told = f"{NO_PROGRESS} for 2".encode()
    assert done.stderr.count(told) == 2, "the card, and the receipt's warning"
    (line,) = hang().verdict
    assert re.fullmatch(r"rank 0 .*\btrain\.py:11 in <module>: time\.sleep\(5\)", line)


@pytest.mark.parametrize(
    "slow",
    [
        "time.sleep(4)\ntrain(2)\n",  # the first step
        "train(2)\nwith torch.no_grad():\n"  # validation
        "    for batch in torch.utils.data.DataLoader(range(5)):\n        time.sleep(0.8)\n",
        "import torch.distributed as dist\ntrain(2)\n"  # ranks that only add up
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(5):\n    dist.all_reduce(torch.ones(1))\n    time.sleep(0.8)\n"
        "dist.destroy_process_group()\n",
        "train(2)\nwith open('checkpoint', 'wb', buffering=0) as file:\n"
        "    for _ in range(40):\n        file.write(b'x')\n        time.sleep(0.1)\n",
    ],
    ids=["first step", "validation", "collectives", "checkpoint"],
)
def test_what_is_no_hang(fasttrain: Any, script: Any, only_run_dir: Any, slow: str) -> None:
    done = fasttrain("run", script(MODEL + slow), *QUIETLY)
    assert done.returncode == 0
    assert not (only_run_dir() / "hang.json").exists()


def test_a_compilation_is_no_hang(fasttrain: Any, script: Any, tmp_path: Path) -> None:
    compiles = """
def slowly(graph, inputs):
    time.sleep(3.5 * (len(inputs[0].shape) - 2))
    return graph
compiled = torch.compile(lambda x: x * 2, backend=slowly, dynamic=False)
compiled(torch.ones(3, 3))
train(2)
compiled(torch.ones(3, 3, 3))
"""
    done = fasttrain("run", script(MODEL + compiles), *QUIETLY)
    assert done.returncode == 0, done.stderr.decode()
    answers = next(tmp_path.glob("fasttrain_runs/*/stacks-0.txt"))
    assert "convert_frame" in answers.read_text(), "it was asked, and had an excuse"


@pytest.mark.parametrize(
    "waits",
    [
        "print('begun', flush=True)\ninput()\n",
        "for _ in range(300):\n    print('begun', 'x' * 999)\n",
    ],
    ids=["for a line to be typed", "for its output to be read"],
)
def test_who_waits_for_a_person_has_not_hung(fasttrain: Any, script: Any, waits: str) -> None:
    pipe, path = subprocess.PIPE, script(MODEL + f"train(2)\n{waits}print('trained')\n")
    with fasttrain.start("run", path, *QUIETLY, "--quiet", stdin=pipe, stdout=pipe) as process:
        assert process.stdout.read(5) == b"begun"
        time.sleep(5)
        rest, _ = process.communicate(b"\n", 30)
    assert (process.returncode, rest.splitlines()[-1]) == (0, b"trained")


def test_a_stopped_run_has_not_hung(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path
) -> None:
    path = script(MODEL + "train(2)\nopen('ready', 'w').close()\ntrain(1)\ntime.sleep(1)\n")
    process = fasttrain.start("run", path, *QUIETLY)
    until((tmp_path / "ready").exists)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.send_signal(signal.SIGSTOP)
    time.sleep(4)
    for member in family:
        member.send_signal(signal.SIGCONT)
    assert process.wait(120) == 0
