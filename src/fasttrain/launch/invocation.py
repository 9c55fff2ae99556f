"""The circumstances of one call, read once at the edge."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import fasttrain
from fasttrain.launch.run_dir.cache import choose_cache
from fasttrain.launch.run_dir.paths import default_run_dir, new_run_id
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.places import AGENT_PROGRAM, WORKER_PROGRAM, program
from fasttrain.model.plan import Invocation, Target
from fasttrain.model.script import ScriptFacts
from fasttrain.model.settings import Settings


def working_directory() -> Path:
    """Give the working directory.

    Raises:
        FasttrainError: ``cwd-gone`` where it has been removed.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise FasttrainError(
            "the working directory is gone",
            why="it was removed after this shell had gone there",
            fix="go to one that exists, with cd",
            slug="cwd-gone",
            exit_code=ExitCode.CANNOT_START,
        ) from error


def active_elsewhere(environ: Mapping[str, str]) -> str:
    """Return the active virtual environment if it isn't the one that fasttrain is installed in.

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
    """Give working directory, interpreter, run directory and cache of this call."""
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
