"""Plans and reports to launch and gather."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.codec import dumps
from fasttrain.model.machine import Cpu, Machine, Torch
from fasttrain.model.outcome import Outcome, RankReport, State, StepStats
from fasttrain.model.plan import Invocation, LaunchPlan, Target
from fasttrain.model.settings import Settings
from fasttrain.planning.plan import make_plan

MACHINE = Machine(
    "node", "Linux", "3.11.9", Torch("2.13.0", "cpu"), Cpu("a CPU", 8, "8 CPUs granted")
)


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    """A plan of one process on a CPU, its run directory not made yet."""
    invocation = Invocation(
        target=Target("script", "train.py", ("--lr", "3")),
        cwd=str(tmp_path),
        python="/usr/bin/python3",
        shim="/lib/shim.py",
        agent="/lib/agent.py",
        environ={},
        run_id="r1",
        run_dir=str(tmp_path / "runs" / "r1"),
        cache_dir="/cache",
        version="0.1.0",
    )
    return make_plan(Settings(), MACHINE, invocation)


@pytest.fixture
def of_command(plan: LaunchPlan) -> Callable[..., LaunchPlan]:
    """Return the plan for a command."""

    def change(name: str, *argv: str) -> LaunchPlan:
        return replace(plan, target=Target("command", name), argv=argv or (name,))

    return change


@pytest.fixture
def report(plan: LaunchPlan) -> Callable[..., RankReport]:
    """Leave the report of one rank in the run directory."""

    def leave(rank: int, *states: State, explicit: bool = False, **changes: Any) -> RankReport:
        outcomes = tuple(
            Outcome("amp", "bfloat16", state, f"because of {rank}", explicit) for state in states
        )
        made = RankReport(rank, "cpu", "2.13.0", outcomes, StepStats(steps=3), finished=True)
        made = dataclasses.replace(made, **changes)
        folder = Path(plan.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.json").write_text(dumps(made))
        return made

    return leave


@pytest.fixture
def slug() -> Callable[..., Any]:
    """Return slug and exit code of the error that a call ends in."""
    from fasttrain.model.errors import FasttrainError

    def of(call: Callable[..., object], *args: object) -> tuple[str, int]:
        with pytest.raises(FasttrainError) as caught:
            call(*args)
        return caught.value.slug, int(caught.value.exit_code)

    return of
