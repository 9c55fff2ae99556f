"""Whoever is hit by whatever signal: nothing of the run is left on this machine.

``pytest -m faults`` runs these alone and prints what became of each run as a table.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.faults

# Each rank has two children as DataLoader workers are, a grandchild in a session of its own, and
# one that has lost its parent. It fails when one of them is gone, as a DataLoader does.
FAMILY = """
import multiprocessing, os, subprocess, sys, time

rank = os.environ.get("RANK", "0")
SLEEP = "import os, sys, time; open(f'pid-{sys.argv[1]}-{os.getpid()}', 'w'); time.sleep(60)"
DETACH = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])"

def load():
    subprocess.Popen([sys.executable, "-Sc", SLEEP, rank], start_new_session=True)
    time.sleep(60)

def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")")[1].split()[0] not in "ZX"
    except OSError:
        return False

if __name__ == "__main__":
    loaders = [multiprocessing.get_context("fork").Process(target=load, daemon=True)
               for _ in range(2)]
    [loader.start() for loader in loaders]
    subprocess.run([sys.executable, "-Sc", DETACH, SLEEP, rank])
    def found():
        return [name.split("-")[2] for name in os.listdir() if name.startswith(f"pid-{rank}-")]
    while len(found()) < 3:
        time.sleep(0.01)
    relatives = [*found(), *(loader.pid for loader in loaders)]
    open(f"ready-{rank}", "w").close()
    while all(map(lives, relatives)):
        time.sleep(0.01)
    os._exit(1)
"""
LOADERS = """
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        return torch.zeros(1)

for step, batch in enumerate(torch.utils.data.DataLoader(Data(), num_workers=2)):
    if step == 2:
        open("ready-0", "w").close()
"""
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2", "SIGKILL")
TARGETS = {1: ("launcher", "worker"), 2: ("launcher", "agent", "worker")}
PARALLEL = 3
PATIENCE_S = 40.0


@dataclass(frozen=True)
class Fault:
    """A signal to one process of a run.

    Attributes:
        signal: Its name.
        target: Who gets it: ``launcher``, ``agent``, ``worker``, or the number of any process.
        ranks: Workers of the run.
        after_s: When it comes; None for when all processes are there.
    """

    signal: str
    target: str | int
    ranks: int
    after_s: float | None = None

    def __str__(self) -> str:
        when = "" if self.after_s is None else f"-after-{self.after_s:.2f}s"
        return f"{self.signal}-{self.target}-{self.ranks}{when}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run: its exit code, the seconds from the signal on, and who stayed."""

    code: int
    seconds: float
    processes: int
    left: list[str]


def random_faults(number: int, seed: int) -> list[Fault]:
    """Give faults at any process; half of them at any time, every fourth with two ranks."""
    chance = random.Random(seed)
    faults = []
    for index in range(number):
        ranks = 2 if index % 4 == 0 else 1
        after_s = chance.uniform(0.05, 1.5) if index % 2 else None
        faults.append(Fault(chance.choice(SIGNALS), chance.randrange(100), ranks, after_s))
    return faults


MATRIX = [
    Fault(name, target, ranks)
    for ranks, targets in TARGETS.items()
    for target in targets
    for name in SIGNALS
]
RANDOM = random_faults(20, seed=7)


class Run:
    """One run of the family, from its start to its last process."""

    def __init__(self, folder: Path, argv: list[str], environ: dict[str, str]) -> None:
        self.folder = folder
        self.seen: set[psutil.Process] = set()
        with (folder / "said").open("wb") as said:
            self.launcher = subprocess.Popen(
                argv, cwd=folder, env=environ, stdout=said, stderr=said
            )

    def look(self) -> list[psutil.Process]:
        """Give what is alive of it: by descent, by the mark, and by what the script wrote down."""
        self._add(self._descendants)
        run_ids = {path.name for path in self.folder.glob("fasttrain_runs/*")}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FASTTRAIN_RUN_ID") in run_ids:
                    self.seen.add(process)
        for path in self.folder.glob("pid-*"):
            self._add(lambda path=path: [psutil.Process(int(path.name.split("-")[2]))])
        return sorted(filter(lives, self.seen), key=lambda process: process.pid)

    def _add(self, find: Callable[[], list[psutil.Process]]) -> None:
        with contextlib.suppress(psutil.Error):
            self.seen.update(find())

    def _descendants(self) -> list[psutil.Process]:
        launcher = psutil.Process(self.launcher.pid)
        return [launcher, *launcher.children(recursive=True)]

    def victim(self, target: str | int) -> psutil.Process:
        processes = self.look()
        if isinstance(target, int):
            return processes[target % len(processes)]
        end = {"agent": "shim/agent.py", "worker": "shim/__main__.py"}
        if target == "launcher":
            return psutil.Process(self.launcher.pid)
        return next(one for one in processes if end[target] in command(one).split(" --")[0])

    def end(self) -> None:
        for process in self.look():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.launcher.wait()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "ended while it was looked at"


def wait_for(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def strike(fault: Fault, folder: Path, environ: dict[str, str]) -> Outcome:
    """Start a run, hit it, and wait for its end."""
    (folder / "train.py").write_text(FAMILY)
    several = ["--nproc-per-node", "2", "--strategy", "none"] if fault.ranks == 2 else []
    argv = [sys.executable, "-m", "fasttrain", "run", "train.py", "--device", "cpu", *several]
    run = Run(folder, argv, environ)
    try:
        if fault.after_s is None:
            ready = wait_for(lambda: len(list(folder.glob("ready-*"))) == fault.ranks)
            assert ready, (folder / "said").read_text()
        else:
            time.sleep(fault.after_s)
        victim, processes = run.victim(fault.target), len(run.seen)
        started_s = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(getattr(signal, fault.signal))
        if fault in RANDOM and not wait_for(lambda: not lives(victim), 2):
            run.launcher.kill()  # it shrugged it off, as the guardian and a starting torch do
        code = run.launcher.wait(PATIENCE_S)
        wait_for(lambda: not run.look() or time.monotonic() > started_s + 8)
        left = [command(process) for process in run.look()]
        return Outcome(code, time.monotonic() - started_s, processes, left)
    finally:
        run.end()


@pytest.fixture(scope="module")
def struck(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    environ: dict[str, str],
) -> dict[Fault, Future[Outcome]]:
    """Make the runs of all tests that were chosen, some at a time, as they mostly wait."""
    faults = {
        item.callspec.params["fault"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "struck" in item.fixturenames
    }
    with ThreadPoolExecutor(PARALLEL) as pool:
        return {
            fault: pool.submit(strike, fault, tmp_path_factory.mktemp("run"), environ)
            for fault in sorted(faults, key=str)
        }  # all of them have ended when the pool has


@pytest.mark.parametrize("fault", [*MATRIX, *RANDOM], ids=str)
def test_nothing_of_the_run_is_left(
    struck: dict[Fault, Future[Outcome]], fault: Fault, record_property: Any
) -> None:
    outcome = struck[fault].result()
    told = [fault.signal, str(fault.target), str(fault.ranks)]
    told += ["all there" if fault.after_s is None else f"{fault.after_s:.2f} s"]
    told += [str(outcome.processes), str(outcome.code), f"{outcome.seconds:.2f} s"]
    record_property("fault", [*told, str(len(outcome.left))])
    assert outcome.left == []
    if fault in MATRIX:
        number = getattr(signal, fault.signal)
        killed = fault.target == "launcher" and number == signal.SIGKILL
        assert outcome.code == (-number if killed else 128 + number)


@pytest.mark.parametrize("target", ["launcher", "worker"])
def test_workers_of_a_data_loader_end_too(
    tmp_path: Path, environ: dict[str, str], target: str
) -> None:
    (tmp_path / "train.py").write_text(LOADERS)
    run = Run(tmp_path, [sys.executable, "-m", "fasttrain", "run", "train.py"], environ)
    try:
        assert wait_for((tmp_path / "ready-0").exists)
        assert len(run.look()) == 5, "launcher, guardian, worker and two of the loader's"
        run.victim(target).kill()
        run.launcher.wait(PATIENCE_S)
        assert wait_for(lambda: not run.look(), 8), run.look()
    finally:
        run.end()
