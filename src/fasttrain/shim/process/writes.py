"""Has what a run that tunes or proves writes go to a folder that is removed after it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.process.scratch import CannotIsolate, isolate


def throw_writes_away(plan: LaunchPlan) -> None:
    """Redirect what this process and its children write from now on, if the plan says so.

    Several ranks have it from the agent that starts them, so that each reads what another one has
    written, such as a checkpoint.

    Raises:
        SystemExit: ``tune-writes`` if the kernel refuses.
    """
    apart = plan.tuning or plan.proof
    if apart is None or not apart.scratch:
        return
    try:
        isolate(Path(apart.scratch), [*map(Path, apart.keep)], [*_written(plan)])
    except CannotIsolate as error:
        refuse(
            FasttrainError(
                "what the script writes can't be kept apart here",
                why=str(error),
                fix="--keep-writes, if the script may write its files",
                slug="tune-writes",
                exit_code=ExitCode.UNAVAILABLE,
            )
        )


def _written(plan: LaunchPlan) -> Iterator[Path]:
    """Yield the folders in which scripts write."""
    yield Path(plan.cwd)
    if plan.target.kind == "script":
        yield Path(plan.cwd, plan.target.name).resolve().parent
    with suppress(RuntimeError):  # this user has none
        yield Path.home()
    with suppress(FileNotFoundError):
        yield Path(tempfile.gettempdir())
