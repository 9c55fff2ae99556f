"""Plans as the command makes them, for workers that are started without it."""

from __future__ import annotations

import sys
from pathlib import Path

from fasttrain.config.resolve import resolve
from fasttrain.hardware.machine_file import read_machine
from fasttrain.model.plan import Invocation, LaunchPlan, Target
from fasttrain.planning.plan import make_plan

HERE = Path(__file__).parent
MACHINES = HERE.parent / "data" / "machines"


def plan_for(machine: str, preset: str | None = None, **flags: str) -> LaunchPlan:
    """Return the plan of ``fasttrain run`` with these options on a described machine."""
    settings = resolve(flags, environ={}, cwd=HERE, preset=preset).settings
    invocation = Invocation(
        target=Target("script", "train.py"), cwd=str(HERE), python=sys.executable, shim="",
        agent="", environ={}, run_id="styles", run_dir=str(HERE), cache_dir=str(HERE), version="0",
    )  # fmt: skip
    return make_plan(settings, read_machine(MACHINES / f"{machine}.json"), invocation)
