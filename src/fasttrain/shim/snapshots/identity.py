"""What a run must be like to go on from a snapshot."""

from __future__ import annotations

import hashlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch

from fasttrain.model.plan import LaunchPlan, Target
from fasttrain.shim.process import rank_variables
from fasttrain.shim.snapshots.errors import refuse_other


def identity_of(plan: LaunchPlan) -> dict[str, str]:
    """Give all that a run's weights follow from, as far as the plan knows it.

    To be asked when the run begins: a script may be edited while it runs, or change its arguments.
    """
    levers = plan.levers
    strategy = levers.strategy.value
    compiled = levers.compile.value
    alone = plan.processes.value.backend == "direct"
    return {
        "script": hashlib.sha256(_text(plan.target, plan.cwd)).hexdigest(),
        "arguments": hashlib.sha256("\0".join(sys.argv[1:]).encode()).hexdigest(),
        "number of ranks": "1" if alone else rank_variables.get("WORLD_SIZE", "1"),
        "device": plan.device_kind.value,
        "--strategy": f"{strategy.mode} {strategy.batch}" if strategy.injected else "none",
        "--amp": levers.amp.value.precision,
        "--compile": f"{compiled.mode} {compiled.scope}",
        "--optimizer": levers.optimizer.value,
        "torch": torch.__version__,
        "fasttrain": plan.fasttrain_version,
    }


def _text(target: Target, cwd: str) -> bytes:
    """Give what is in the file that runs."""
    if target.kind == "script":
        return Path(cwd, target.name).read_bytes()
    spec = _found(target.name)
    if spec is None or spec.origin is None or not hasattr(spec.loader, "get_data"):
        return target.name.encode()  # as `python -m` will say, there is nothing to run
    loader: Any = spec.loader
    text: bytes = loader.get_data(spec.origin)  # of a module in a zip file, too
    return text


def _found(name: str) -> ModuleSpec | None:
    """Give where a module is, importing nothing: a package may be just being imported itself."""
    spec, whole = None, ""
    for part in name.split("."):
        whole = f"{whole}.{part}".lstrip(".")
        path = None if spec is None else spec.submodule_search_locations
        spec = PathFinder.find_spec(whole, path)
        if spec is None:
            return None
    if spec is not None and spec.submodule_search_locations is not None:
        return PathFinder.find_spec(f"{name}.__main__", spec.submodule_search_locations)
    return spec


def compare(here: dict[str, str], then: dict[str, str]) -> None:
    """See that a run is what one was.

    Raises:
        SystemExit: ``snapshot-mismatch`` when it is not.
    """
    for name, value in here.items():
        before = then.get(name, "")
        if value == before:
            continue
        if name in ("script", "arguments"):
            refuse_other(f"the {name} changed since it was taken")
        refuse_other(f"{name} was {before} when it was taken, and is {value} now")
