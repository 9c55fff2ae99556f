"""An agent that died itself: there is no rank to be named, but it is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fasttrain.launch.crash.evidence import FailedRun
from fasttrain.launch.crash.judge import AGENT_DIED, judge
from fasttrain.model.crash import Surroundings, WorkerExit, WorkerExits
from fasttrain.model.plan import LaunchPlan


@pytest.fixture
def several(plan: LaunchPlan) -> LaunchPlan:
    """A plan of an agent, with its run directory."""
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    processes = replace(plan.processes.value, backend="torchrun", nproc_per_node=2)
    return replace(plan, processes=replace(plan.processes, value=processes))


def told(plan: LaunchPlan, code: int, *ends: WorkerExit) -> tuple[str, ...]:
    none = Surroundings()
    run = FailedRun(plan, plan, {}, code, none, none, frozenset(), exits=WorkerExits(ends))
    return judge(run)[1]


def test_an_agent_that_was_killed(several: LaunchPlan) -> None:
    (text,) = told(several, 137)
    assert text.startswith(f"{AGENT_DIED} SIGKILL")
    assert "agent.log" in text


@pytest.mark.parametrize("code", [1, 130, 143])
def test_an_agent_that_was_stopped_or_could_not_start(several: LaunchPlan, code: int) -> None:
    assert told(several, code) == ()


def test_a_worker_that_was_killed(several: LaunchPlan) -> None:
    assert told(several, 137, WorkerExit(0, 7, -9, 1, 1)) == ()
