"""Plans as the command makes them, for workers that are started without it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from fasttrain.config.resolve import resolve
from fasttrain.hardware.machine_file import read_machine
from fasttrain.model.plan import Invocation, LaunchPlan, ScriptFacts, Target
from fasttrain.planning.plan import make_plan

HERE = Path(__file__).parent
MACHINES = HERE.parent / "data" / "machines"


def plan_for(
    machine: str,
    preset: str | None = None,
    environ: Mapping[str, str] | None = None,
    facts: ScriptFacts | None = None,
    **flags: str,
) -> LaunchPlan:
    """Return the plan of ``fasttrain run`` with these options on a described machine."""
    settings = resolve(flags, environ={}, cwd=HERE, preset=preset).settings
    invocation = Invocation(
        target=Target("script", "train.py"), cwd=str(HERE), python=sys.executable, shim="",
        agent="", environ=dict(environ or {}), run_id="styles", run_dir=str(HERE),
        cache_dir=str(HERE), version="0", facts=facts or ScriptFacts(),
    )  # fmt: skip
    return make_plan(settings, read_machine(MACHINES / f"{machine}.json"), invocation)
