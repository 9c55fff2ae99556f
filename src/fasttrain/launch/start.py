"""Runs a plan, from claiming its run directory to writing its receipt."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import fasttrain
from fasttrain.launch.node_run import NodeRun, Observers
from fasttrain.launch.preflight import check_port, find_program
from fasttrain.launch.receipts import gather
from fasttrain.launch.run_dir.lock import begin, claim
from fasttrain.launch.run_dir.paths import choose_cache, default_run_dir, new_run_id, secure_cache
from fasttrain.launch.run_node import attend, compose
from fasttrain.model.codec import dumps
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.outcome import Receipt
from fasttrain.model.places import AGENT_PROGRAM, WORKER_PROGRAM, program
from fasttrain.model.plan import PLAN_FILE, Invocation, LaunchPlan, ScriptFacts, Target
from fasttrain.model.settings import Settings


def start(
    plan: LaunchPlan, masked: LaunchPlan, environ: Mapping[str, str], observers: Observers
) -> Receipt:
    """Start this node's processes, supervise them to their end, and return the receipt.

    Args:
        plan: What to start.
        masked: The same without secrets; only this one is written to disk.
        environ: The environment as the user has it.
        observers: Who observes the run.

    Raises:
        FasttrainError: Nothing could be started.
    """
    environment = compose(environ, plan.environment)
    program = find_program(plan, environment)
    check_port(plan.processes.value)
    with claim(plan.run_dir, plan.preempt.value.resume) as claimed:
        told = (*claimed.warnings, *secure_cache(plan, environment))
        for warning in told:
            observers.display.tell(f"warning: {warning}")
        begin(claimed, PLAN_FILE, dumps(masked))
        ended = attend(NodeRun(plan, masked, program, environ, environment), observers)
        return gather(masked, replace(ended, warnings=(*told, *ended.warnings)))


# The circumstances of one call, read once at the edge.


def working_directory() -> Path:
    """Return the working directory.

    Raises:
        FasttrainError: ``cwd-gone`` where it has been removed.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise FasttrainError(
            "the working directory is gone",
            why="it was removed while this shell was in it",
            fix="change to one that exists, with cd",
            slug="cwd-gone",
            exit_code=ExitCode.CANNOT_START,
        ) from error


def active_elsewhere(environ: Mapping[str, str]) -> str:
    """Return the active virtual environment if it isn't the one that fasttrain runs in.

    Conda's base, which a shell activates by itself, counts only where fasttrain has no virtual
    environment of its own.
    """
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = environ.get(name, "")
        base = name == "CONDA_PREFIX" and environ.get("CONDA_DEFAULT_ENV") == "base"
        if base and sys.prefix != sys.base_prefix:
            continue
        if active and os.path.isdir(active):  # noqa: PTH112 - a name that is too long is none
            return "" if Path(active).samefile(sys.prefix) else f"{name}={active}"
    return ""


def read_invocation(
    target: Target, settings: Settings, environ: Mapping[str, str], facts: ScriptFacts
) -> Invocation:
    """Return working directory, interpreter, run directory and cache of this call."""
    cwd = str(working_directory())
    run_id = new_run_id(target.name)
    named = settings.resume.value or settings.run_dir.value
    run_dir = str(Path(cwd, named)) if named else default_run_dir(cwd, run_id)
    cache_dir, cache_note = choose_cache(environ, run_dir)
    return Invocation(
        target=target,
        cwd=cwd,
        python=sys.executable,
        # By path, because the launcher never imports the shim.
        shim=program(WORKER_PROGRAM),
        agent=program(AGENT_PROGRAM),
        environ=dict(environ),
        run_id=run_id,
        run_dir=run_dir,
        cache_dir=cache_dir,
        cache_note=cache_note,
        version=fasttrain.__version__,
        facts=facts,
    )
