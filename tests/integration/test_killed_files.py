"""Whenever SIGKILL comes, the files of a run are whole, but for the last line of the events.

``pytest -m faults`` kills more runs, and prints what became of each as a table.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.model.codec import loads
from fasttrain.model.crash import Crash, Failure, WorkerExits
from fasttrain.model.hang import HeartbeatAddress
from fasttrain.model.outcome import RankReport, Receipt
from fasttrain.model.plan import LaunchPlan

pytestmark = pytest.mark.faults

SEED = 11
WRITERS = 30
RUNS_IN_CI, RUNS_ALONE = 3, 40
PATIENCE_S = 60.0

# Writes the files of a worker as fast as it can, larger ones than any pipe or buffer takes at once.
WRITES = """
import os, sys
from pathlib import Path
from fasttrain.shim.reporter import Reporter
from fasttrain.model.outcome import RankReport, StepStats

run_dir = Path(sys.argv[1])
reporter = Reporter(run_dir, 0)
number = 0
while True:
    for _ in range(20):
        number += 1
        text = str(number % 10) * (number * 997 % 20_000)
        reporter.event(lambda: {"step": number, "text": text, "end": number})
    reporter.report(lambda: RankReport(0, text, "", (), StepStats(steps=number)))
"""
# Tells of every step, and then fails.
TRAINS = """
import sys, torch
from fasttrain.shim import runtime
runtime.EVENT_EVERY_S = runtime.REPORT_EVERY_S = 0.0
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
open("begun", "w").close()
for step in range(300):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
open("failing", "w").close()
raise ValueError("of a run that fails anyway")
"""
KINDS: dict[str, type] = {
    "plan": LaunchPlan, "receipt": Receipt, "crash": Crash, "ends": WorkerExits, "failure": Failure,
    "rank": RankReport, "heartbeat": HeartbeatAddress,
}  # fmt: skip


def parse_strictly(run_dir: Path) -> list[str]:
    """Read every file that fasttrain has written, and give the names of those that were there."""
    read = []
    for path in sorted(run_dir.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        if path.suffix == ".jsonl":
            *lines, _cut = path.read_text().split("\n")  # Linux may stop between two pages
            steps = [json.loads(line)["step"] for line in lines]
            assert steps == sorted(steps)
        elif path.suffix == ".json":
            loads(KINDS[path.name.partition(".")[0].partition("-")[0]], path.read_bytes())
        else:
            assert path.suffix in (".log", ".txt", ".lock", ".tmp"), path
            continue
        read.append(path.name)
    return read


def test_a_writer_that_is_killed_leaves_whole_files(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    chance = random.Random(SEED)
    for index in range(WRITERS):
        run_dir = tmp_path / str(index)
        run_dir.mkdir()
        process = subprocess.Popen([sys.executable, "-c", WRITES, run_dir], env=environ)
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while not (run_dir / "rank-0.json").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.03))
        finally:
            process.kill()
            process.wait()
        assert parse_strictly(run_dir) == ["events-0.jsonl", "rank-0.json"]
        shutil.rmtree(run_dir)


@dataclass(frozen=True)
class Kill:
    """One process of one run that is killed.

    Attributes:
        target: ``launcher`` or ``worker``.
        after: What it comes after: the start, the first step, or the end of the training.
        delay_s: How long after.
    """

    target: str
    after: str
    delay_s: float

    def __str__(self) -> str:
        return f"{self.target}-{self.delay_s:.3f}s-after-{self.after}"


def kills(number: int) -> list[Kill]:
    """Return kills at random moments: of a start, of the training, and of the end."""
    chance = random.Random(SEED)
    longest_s = {"start": 3.0, "begun": 0.5, "failing": 0.3}
    afters = list(longest_s)
    return [
        Kill(("worker", "launcher")[index % 2], after, chance.uniform(0, longest_s[after]))
        for index in range(number)
        for after in (afters[index // 2 % len(afters)],)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Kill few runs among all other tests, and many where nothing else was asked for."""
    if "kill" in metafunc.fixturenames:
        alone = metafunc.config.option.markexpr == "faults"
        metafunc.parametrize("kill", kills(RUNS_ALONE if alone else RUNS_IN_CI), ids=str)


def strike(kill: Kill, folder: Path, environ: dict[str, str]) -> None:
    """Make one run, and kill one of its processes at the moment that is wanted."""
    (folder / "train.py").write_text(TRAINS)
    argv = [sys.executable, "-m", "fasttrain", "run", "train.py", "--device", "cpu"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen([*argv, "--run-dir", "run"], cwd=folder, env=environ, **quiet)
    deadline_s = time.monotonic() + PATIENCE_S
    try:
        while kill.after != "start" and not (folder / kill.after).exists():
            assert launcher.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        time.sleep(kill.delay_s)
        with contextlib.suppress(psutil.NoSuchProcess):
            for victim in _victims(launcher.pid, kill.target):
                victim.send_signal(signal.SIGKILL)
        launcher.wait(PATIENCE_S)
    finally:
        launcher.kill()
        launcher.wait()


def _victims(launcher: int, target: str) -> list[psutil.Process]:
    """Return the process to be killed; none where the worker has not started yet, or has ended."""
    process = psutil.Process(launcher)
    if target == "launcher":
        return [process]
    return [one for one in process.children() if "shim/__main__.py" in " ".join(one.cmdline())]


@pytest.fixture(scope="module")
def struck(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, environ: Any
) -> dict[Kill, Path]:
    """Make the runs of all tests that were chosen, two at a time."""
    chosen = [
        item.callspec.params["kill"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "struck" in item.fixturenames
    ]
    folders = {kill: tmp_path_factory.mktemp("run") for kill in chosen}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda kill: strike(kill, folders[kill], environ), chosen))
    return folders


def test_a_run_that_is_killed_leaves_whole_files(
    struck: dict[Kill, Path], kill: Kill, record_property: Any
) -> None:
    run_dir = struck[kill] / "run"
    read = parse_strictly(run_dir) if run_dir.exists() else []
    words = ["SIGKILL", kill.target, "1", f"{kill.delay_s:.3f} s after {kill.after}", "", "", ""]
    record_property("fault", [*words, f"{len(read)} whole files"])
    if kill.after != "start":
        assert "plan.json" in read
        assert "events-0.jsonl" in read or kill.after == "begun"
    if kill.target == "worker" and kill.after != "start":
        assert "receipt.json" in read, "the launcher lives to tell"
