"""The circumstances of one call, read once at the edge."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import fasttrain
from fasttrain.launch.run_dir import default_run_dir, new_run_id
from fasttrain.spec.places import cache_folder
from fasttrain.spec.plan import Invocation, Target
from fasttrain.spec.script import ScriptFacts
from fasttrain.spec.settings import Settings

PACKAGE = Path(fasttrain.__file__).parent


def read_invocation(
    target: Target, settings: Settings, environ: Mapping[str, str], facts: ScriptFacts
) -> Invocation:
    """Give working directory, interpreter, run directory and cache of this call."""
    cwd = str(Path.cwd())
    run_id = new_run_id(target.name)
    named = settings.run_dir.value
    return Invocation(
        target=target,
        cwd=cwd,
        python=sys.executable,
        # By path, because the launcher never imports the shim.
        shim=str(PACKAGE / "shim" / "__main__.py"),
        agent=str(PACKAGE / "shim" / "agent.py"),
        environ=dict(environ),
        run_id=run_id,
        run_dir=str(Path(cwd, named)) if named else default_run_dir(cwd, run_id),
        cache_dir=str(cache_folder(environ)),
        version=fasttrain.__version__,
        facts=facts,
    )
