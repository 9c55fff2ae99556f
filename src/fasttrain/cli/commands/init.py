"""``fasttrain init``: copy a template to start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

import fasttrain
from fasttrain.config.options import nearest
from fasttrain.model.errors import ExitCode, FasttrainError

NAME = "init"
PACKAGED = Path(fasttrain.__file__).parent / "templates"  # in an installed wheel
SOURCE = Path(fasttrain.__file__).parents[2] / "templates"  # in a checkout


def init(
    name: Annotated[
        str | None, typer.Argument(help="Template; without one, all are listed.")
    ] = None,
    directory: Annotated[
        str | None, typer.Argument(help="New directory for it (default: its name).")
    ] = None,
) -> int:
    """Copy a training script to start from, and a fasttrain.yaml next to it."""
    names = sorted({script.parent.name for script in _templates().glob("*/*.py")})
    if name is None:
        typer.echo("\n".join(names))
        return 0
    if name not in names:
        near = nearest(name, names)
        raise FasttrainError(
            f"there is no template {name!r}",
            why=f"the templates are {', '.join(names)}",
            fix=f"fasttrain init {near or names[0]}",
            slug="template-unknown",
            exit_code=ExitCode.USAGE,
        )
    target = Path(directory or name)
    _copy(name, target)
    script = next(target.glob("*.py"))
    typer.echo(f"fasttrain run {script}")
    return 0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME)(init)


def _templates() -> Path:
    return PACKAGED if PACKAGED.is_dir() else SOURCE


def _copy(name: str, target: Path) -> None:
    try:
        shutil.copytree(
            _templates() / name, target, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
        shutil.copy(_templates() / "fasttrain.yaml", target)
    except OSError as error:
        raise FasttrainError(
            f"{target} can't be created",
            why=error.strerror or str(error),
            fix="name a directory that doesn't exist yet",
            slug="template-target",
            exit_code=ExitCode.CANNOT_START,
        ) from error
