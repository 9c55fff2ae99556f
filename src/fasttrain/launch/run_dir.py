"""The run directory: private to the user, and never shared by two runs."""

from __future__ import annotations

import os
import secrets
from datetime import datetime
from pathlib import Path

from fasttrain.spec.codec import dumps
from fasttrain.spec.errors import ExitCode, FasttrainError
from fasttrain.spec.job import JOB_FILE
from fasttrain.spec.places import RUNS_FOLDER
from fasttrain.spec.plan import PLAN_FILE, LaunchPlan

RECEIPT_FILE = "receipt.json"


def new_run_id(target: str) -> str:
    """Give a name for a run that sorts by time: ``2026-11-21_14-30-05_train_1f9c``."""
    stem = Path(target).stem or "run"
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in stem)[:40]
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{safe}_{secrets.token_hex(2)}"


def default_run_dir(cwd: str, run_id: str) -> str:
    """Give the absolute directory of a run for which none was named."""
    return str(Path(cwd, RUNS_FOLDER, run_id))


def create(plan: LaunchPlan) -> Path:
    """Make the run directory and write the plan into it.

    Args:
        plan: The plan with its secrets already masked.

    Raises:
        FasttrainError: It can't be made or written, or another run has it.
    """
    return make_run_dir(plan.run_dir, PLAN_FILE, dumps(plan))


def make_run_dir(named: str, first_file: str, text: str) -> Path:
    """Make a run directory and write the file into it that makes it one run's own.

    Raises:
        FasttrainError: It can't be made or written, or another run has it.
    """
    path = Path(named)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any((path / name).exists() for name in (PLAN_FILE, JOB_FILE)):
            raise _error(
                path, "another run's plan is in it", "name a new directory", "run-dir-used"
            )
        # An existing directory may be open to others; what is written here is the user's alone.
        path.chmod(0o700)
        write_private(path / first_file, text)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte, which YAML can hold
        why = getattr(error, "strerror", None) or str(error)
        raise _error(path, why, "name a directory that can be written", "run-dir") from error
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


def _error(path: Path, why: str, fix: str, slug: str) -> FasttrainError:
    return FasttrainError(
        f"the run directory {path} can't be used",
        why=why,
        fix=f"{fix} with --run-dir",
        slug=slug,
        exit_code=ExitCode.CANNOT_START,
    )


def latest_run_dir(cwd: Path) -> Path:
    """Give the run directory that was begun last below ``cwd``.

    Raises:
        FasttrainError: There is none.
    """
    runs = sorted(path.parent for path in (cwd / RUNS_FOLDER).glob(f"*/{PLAN_FILE}"))
    if runs:
        return runs[-1]
    raise FasttrainError(
        "there is no run to report on",
        why=f"{cwd / RUNS_FOLDER} holds no run directory",
        fix="name one: fasttrain report RUN_DIR",
        slug="receipt",
        exit_code=ExitCode.UNAVAILABLE,
    )
