"""A launcher is known by the lock that it holds, and by nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fasttrain.model.codec import dumps
from fasttrain.model.plan import LaunchPlan
from fasttrain.processes import launchers as found_by
from fasttrain.processes.launchers import launchers
from fasttrain.processes.table import look_up

HOLDS = """
import sys
from fasttrain.launch.run_dir.lock import begin, claim
with claim(sys.argv[1]) as claimed:
    begin(claimed, "plan.json", sys.stdin.readline())
    print(flush=True)
    sys.stdin.read()
"""
# As a backup does, or somebody who wants to know whether the lock is free.
READS = """
import sys
with open(sys.argv[1] + "/launcher.lock") as lock:
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def plan(plan: LaunchPlan) -> LaunchPlan:
    """Return a plan of a run whose name no other test's run has: all of this machine are asked."""
    return replace(plan, run_id=f"held-by-{os.getpid()}")


@contextmanager
def running(code: str, plan: LaunchPlan) -> Iterator[int]:
    argv = [sys.executable, "-c", code, plan.run_dir]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(dumps(plan).replace("\n", " ").encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"\n"
        yield process.pid


def test_who_holds_a_run_directory_is_its_launcher(plan: LaunchPlan) -> None:
    with ExitStack() as stack:
        launcher = stack.enter_context(running(HOLDS, plan))
        stack.enter_context(running(READS, plan))
        assert launchers()[plan.run_id] == (look_up(launcher), Path(plan.run_dir))
    assert plan.run_id not in launchers()


def test_who_asks_from_within_a_run_spares_its_launcher(plan: LaunchPlan) -> None:
    asks = HOLDS.replace("sys.stdin.read()", "print(launchers(), flush=True); sys.stdin.read()")
    code = f"from fasttrain.processes.launchers import launchers\n{asks}"
    argv = [sys.executable, "-c", code, plan.run_dir]
    text = dumps(plan).replace("\n", " ") + "\n"
    done = subprocess.run(argv, input=text, capture_output=True, text=True)
    assert plan.run_id not in done.stdout.splitlines()[1], done.stderr


def test_other_users_launchers_are_left_alone(
    plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(HOLDS, plan) as launcher:
        monkeypatch.setattr(found_by, "is_own", lambda pid: pid != launcher)
        assert plan.run_id not in launchers()


def test_a_directory_that_is_gone_has_no_launcher(plan: LaunchPlan) -> None:
    with running(HOLDS, plan):
        Path(plan.run_dir).rename(f"{plan.run_dir}.old")
        (found,) = [one for one in launchers().values() if plan.run_dir in str(one.run_dir)]
        assert found.run_dir == Path(f"{plan.run_dir}.old")
        Path(f"{plan.run_dir}.old", "launcher.lock").unlink()
        assert plan.run_id not in launchers()
