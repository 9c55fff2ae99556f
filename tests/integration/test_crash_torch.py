"""What torch itself says when it fails on a CPU, caused for real, and what is made of it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.crash.cause_rules import AT_LIMIT, ON_MACHINE
from fasttrain.launch.crash.evidence import FailedRun
from fasttrain.launch.crash.judge import judge
from fasttrain.model.codec import loads
from fasttrain.model.crash import Crash, Surroundings
from fasttrain.model.machine import Cpu, Machine, Torch
from fasttrain.model.plan import Invocation, LaunchPlan, Target
from fasttrain.model.settings import Settings
from fasttrain.planning.plan import make_plan

PROGRAM = Path(__file__).parent / "crashes" / "torch_causes.py"
NAMES = re.findall(r'^    "([a-z0-9-]+)":', PROGRAM.read_text(), re.MULTILINE)
WORDS = {
    "shape-mismatch": "2x5 and 4x3",
    "shape-mismatch-2": "(4) must match the size of tensor b (3)",
    "shape-mismatch-4": "[2] at entry 0 and [3] at entry 1",
    "state-dict": "Linear",
    "device-mismatch": "meta is not on the expected device cpu",
    "not-permitted": "own",
    "library-missing": "libnothere.so.7",
    "built-for-another-2": "torchvision",
    "module-missing": "no_such_module",
    "host-memory": "256 TiB",
    "exception": "KeyError: 'of the worker'",
    "exception-2": "KeyError: 'of the child'",
    "assertion": "embed_dim must be divisible by num_heads",
    "loader-worker": "exit code 3",
    "loader-worker-2": "Killed",
    "loader-worker-3": "exited unexpectedly",
    "shared-memory": "2 GiB",
    "child-died": "signal SIGKILL",
}
HERE = Surroundings(group_oom_kills=3, machine_oom_kills=5, shm_bytes=2 << 30)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: Any) -> dict[str, tuple[Path, int]]:
    """Return the run directory and the exit code of each cause."""
    folder = tmp_path_factory.mktemp("causes")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *NAMES],
        capture_output=True, timeout=280, check=True, cwd=folder,
    )  # fmt: skip
    codes = map(int, done.stdout.split())
    return {name: (folder / name, code) for name, code in zip(NAMES, codes, strict=True)}


def plan_in(run_dir: Path) -> LaunchPlan:
    cpu = Machine("node", "Linux", "3.11.9", Torch("2.13.0", "cpu"), Cpu("a CPU", 8, "8 granted"))
    invocation = Invocation(
        Target("script", "train.py"), "/home/me", "python3", "/shim.py", "/agent.py", {}, "r1",
        str(run_dir), "/cache", "0.1.0",
    )  # fmt: skip
    return make_plan(Settings(), cpu, invocation)


def crash_of(
    run_dir: Path, code: int, after: Surroundings = HERE, before: Surroundings = HERE
) -> Crash:
    plan = plan_in(run_dir)
    shell_code = code if code >= 0 else 128 - code
    run = FailedRun(plan, plan, {}, shell_code, before, after, frozenset({0}))
    crash, problems = judge(run)
    assert not problems
    assert crash is not None
    return crash


@pytest.mark.parametrize("name", NAMES)
def test_cause(ends: dict[str, tuple[Path, int]], name: str) -> None:
    run_dir, code = ends[name]
    crash = crash_of(run_dir, code)
    assert crash.cause == re.sub(r"-\d$", "", name), crash
    assert WORDS.get(name, "") in crash.why
    # The innermost call is kept, and torch's own in between aren't.
    assert all(frame.own for frame in crash.frames[:-1])
    assert any(Path(frame.file) == PROGRAM for frame in crash.frames) or "spawn" in crash.error


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((3, 5, 1 << 30), (4, 6, 1 << 30), f"{AT_LIMIT}, 1 GiB"),
        ((3, 5, None), (4, 6, None), ON_MACHINE),
        ((None, 5, None), (None, 6, None), ON_MACHINE),
        ((3, 5, 1 << 30), (3, 6, 1 << 30), ""),  # of somebody else
        ((None, 5, None), (None, 5, None), ""),
    ],
)
def test_a_worker_killed_for_memory(
    ends: dict[str, tuple[Path, int]], before: Any, after: Any, words: str
) -> None:
    run_dir, code = ends["loader-worker-2"]
    crash = crash_of(run_dir, code, Surroundings(*after), Surroundings(*before))
    assert crash.cause == ("host-memory" if words else "loader-worker")
    assert words in crash.why


def test_every_cause_is_one_that_the_program_has(ends: Any) -> None:
    assert set(NAMES) == set(runpy.run_path(str(PROGRAM), run_name="read")["CAUSES"])


def test_a_script_without_a_main_guard(fasttrain: Any, script: Any, only_run_dir: Any) -> None:
    path = script("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=1)\n")
    done = fasttrain("run", path, "--device", "cpu")
    assert done.returncode == 1
    crash = loads(Crash, (only_run_dir() / "crash.json").read_bytes())
    assert crash.cause == "main-guard"
    assert "__main__" in crash.fix
