"""Where run directories are, and what they are called."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from fasttrain.files import Danger, refused
from fasttrain.launch.run_dir.lock import open_private
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.places import COMPILED_FOLDER, COMPILED_VARIABLE, RUNS_FOLDER, cache_folder
from fasttrain.model.plan import PLAN_FILE, LaunchPlan


def new_run_id(target: str) -> str:
    """Return a name for a run that sorts by time: ``2026-11-21_14-30-05_train_1f9c02b7``.

    The random suffix keeps launchers of a sweep apart, which may start in the same second.
    """
    stem = Path(target).stem or "run"
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in stem)[:40]
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{safe}_{secrets.token_hex(4)}"


def default_run_dir(cwd: str, run_id: str) -> str:
    """Return the absolute directory of a run for which none was named."""
    return str(Path(cwd, RUNS_FOLDER, run_id))


def matching(part: str, names: Iterable[str]) -> list[str]:
    """Return the run of that name alone, or else all whose names contain it."""
    known = list(names)
    return [part] if part in known else [name for name in known if part and part in name]


def find_run_dir(named: str, cwd: Path) -> Path:
    """Return a run's directory by its path, its name, or a part of the name that only it has.

    Raises:
        FasttrainError: ``receipt`` for a part of several names.
    """
    if Path(named, PLAN_FILE).is_file():
        return Path(named)
    names = matching(named, (path.parent.name for path in _plans(cwd)))
    if len(names) > 1:
        raise FasttrainError(
            f"several runs are called {named!r}",
            why=f"it is part of {', '.join(names)}",
            fix="name one of them in full",
            slug="receipt",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return cwd / RUNS_FOLDER / names[0] if names else Path(named)


def _plans(cwd: Path) -> list[Path]:
    return sorted((cwd / RUNS_FOLDER).glob(f"*/{PLAN_FILE}"))


def latest_run_dir(cwd: Path) -> Path:
    """Return the run directory that was begun last below ``cwd``.

    Raises:
        FasttrainError: There is none.
    """
    if plans := _plans(cwd):
        return plans[-1].parent
    raise FasttrainError(
        "there is no run to report on",
        why=f"{cwd / RUNS_FOLDER} holds no run directory",
        fix="name one: fasttrain report RUN_DIR",
        slug="receipt",
        exit_code=ExitCode.UNAVAILABLE,
    )


# Where compiled kernels are kept: programs and pickles, which torch loads without any check.


def choose_cache(environ: Mapping[str, str], run_dir: str) -> tuple[str, str]:
    """Return the folder for what persists between runs, and why it is not the usual one, if so."""
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
    """Make sure that nobody else can write to the folder of compiled kernels; return warnings.

    fasttrain's own folder is made, or if it isn't safe, one in the run directory is used and
    `environment` changed. A folder that the user has named is used all the same.
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
