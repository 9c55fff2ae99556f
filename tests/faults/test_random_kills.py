"""Any process of a run, any signal, at any time: nothing of the run is left on this machine.

The name of each test holds all that chance has decided on, and its number decides it: ``-k
'kill-17-'`` meets the same again.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.observed_run import PATIENCE_S, PROGRAMS, ObservedRun, command, lives, wait_for

pytestmark = pytest.mark.faults

HERE = Path(__file__).parent
SEED = 7
KILLS = {"few": 4, "full": 200}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR2", "SIGABRT")
# Program, ranks, and seconds in which it is there on two cores that do nothing else.
RUNS = (("family.py", 1, 0.7), ("family.py", 2, 3.5), ("loads.py", 2, 6.0))
LATER_S = 1.0  # at most, behind the time when all is there
HEED_S = 2.0  # for a run to notice by itself, where that isn't certain


@dataclass(frozen=True)
class Kill:
    """One kill; equal seeds and numbers give equal ones.

    Attributes:
        number: Its number.
        signal: Name of the signal.
        program: What the run runs.
        ranks: On so many ranks.
        starting: Whether it comes while the run starts, and not behind that.
        after_s: Seconds from the start, or from the time when all is there.
        victim: Who of those that are there.
    """

    number: int
    signal: str
    program: str
    ranks: int
    starting: bool
    after_s: float
    victim: int

    def __str__(self) -> str:
        when = f"{self.after_s:.2f}s-{'starting' if self.starting else 'running'}"
        return f"kill-{self.number}-{self.signal}-{self.program}-{self.ranks}-{when}-{self.victim}"


def kill(number: int) -> Kill:
    """Return a kill; runs and halves of their time take turns, and the rest is chance."""
    chance = random.Random(f"{SEED}-{number}")
    program, ranks, start_s = RUNS[number % len(RUNS)]
    starting = number // len(RUNS) % 2 == 0
    after_s = chance.uniform(0, start_s if starting else LATER_S)
    name, victim = chance.choice(SIGNALS), chance.randrange(1000)
    return Kill(number, name, program, ranks, starting, after_s, victim)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each kill."""
    number = KILLS[metafunc.config.getoption("rounds")]
    metafunc.parametrize("one", [kill(index) for index in range(number)], ids=str)


def test_nothing_is_left(
    one: Kill, tmp_path: Path, environ: dict[str, str], record_property: Any
) -> None:
    several = ["--nproc-per-node", "2"] if one.ranks == 2 else []
    words = ["run", str(HERE / "programs" / one.program), "--device", "cpu", *several]
    run = ObservedRun(tmp_path, [sys.executable, "-m", "fasttrain", *words], environ)
    try:
        if not one.starting:
            there = wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == one.ranks)
            assert there, run.said
        time.sleep(one.after_s)
        kind, victim = chosen(run, one.victim)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(getattr(signal, one.signal))
        end(run, victim, kind)
        left = run.left(files=False)
    finally:
        run.end()
    verdict = f"left: {left}" if left else "ok"
    record_property("table", (f"random kills, seed {SEED}", one.signal, kind, verdict))
    assert left == []


def chosen(run: Any, number: int) -> tuple[str, psutil.Process]:
    """Return one of the kinds of processes that are there, and one process of this kind."""
    kinds: dict[str, list[psutil.Process]] = {}
    for process in run.look():
        kinds.setdefault(kind_of(run, process), []).append(process)
    kind, processes = sorted(kinds.items())[number % len(kinds)]
    return kind, processes[number // len(kinds) % len(processes)]


def kind_of(run: Any, process: psutil.Process) -> str:
    """Return what a process of a run is."""
    words = command(process)
    if process.pid == run.launcher.pid:
        return "launcher"
    if "guardian.py" in words:
        return "guardian"
    for kind, program in PROGRAMS.items():
        if program in words.split(" --")[0]:
            # A child that was forked has its parent's command line.
            same = [p for p in process.parents() if command(p) == words]
            return "loader" if same else kind
    return "grandchild"


def end(run: Any, victim: psutil.Process, kind: str) -> None:
    """Wait for the run's end; where it may go on, as without its guardian, kill its launcher."""
    wait_for(lambda: not lives(victim), HEED_S)
    must_end = kind in ("launcher", "agent", "worker") and not lives(victim)
    if not wait_for(lambda: run.launcher.poll() is not None, 0 if must_end else HEED_S):
        if not must_end:
            run.launcher.kill()
        run.launcher.wait(PATIENCE_S)
