"""Where compiled kernels are kept: programs and pickles, which torch loads unseen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fasttrain.files.trust import Danger, refused
from fasttrain.launch.run_dir.lock import open_private
from fasttrain.model.errors import FasttrainError
from fasttrain.model.places import COMPILED_FOLDER, COMPILED_VARIABLE, cache_folder
from fasttrain.model.plan import LaunchPlan


def choose_cache(environ: Mapping[str, str], run_dir: str) -> tuple[str, str]:
    """Give the folder for what persists between runs, and why it is not the usual one, if so."""
    usual = cache_folder(environ)
    for folder in (usual, usual / COMPILED_FOLDER):
        if danger := _danger(folder):
            return f"{run_dir}/cache", f"{folder} could hold what others put there: {danger.why}"
    return str(usual), ""


def _danger(folder: Path) -> Danger | None:
    try:
        return refused(folder)
    except OSError as error:
        return Danger(error.strerror or str(error))


def secure_cache(plan: LaunchPlan, environment: dict[str, str]) -> tuple[str, ...]:
    """See that nobody else can write to where compiled kernels are kept, and give what to tell.

    A folder of fasttrain's own is made, or else one in the run directory is taken, and
    `environment` changed; of one that the user has named, it is only told.
    """
    named = [v.value for v in plan.environment if v.name == COMPILED_VARIABLE and v.value]
    if not named:
        return ()
    folder, spare = Path(named[0]), Path(plan.run_dir, "cache", COMPILED_FOLDER)
    if folder not in (cache_folder(environment) / COMPILED_FOLDER, spare):
        danger = _danger(folder.absolute())
        told = f"what is compiled into {folder} is run from there, and it isn't yours alone"
        return (f"{told}: {danger.why}",) if danger else ()
    try:
        _make(folder)
    except (OSError, FasttrainError) as error:
        why = error.why if isinstance(error, FasttrainError) else error.strerror
        environment[COMPILED_VARIABLE] = str(spare)
        return (f"compiled kernels are kept in {spare}, for this run alone: {folder}: {why}",)
    return ()


def _make(folder: Path) -> None:
    for made in (folder.parent, folder):
        os.close(open_private(made))
