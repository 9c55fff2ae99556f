"""``fasttrain tune``: its arguments and options."""

from __future__ import annotations

from typing import Any

import typer

from fasttrain.cli.commands.run import RunCommand, line_of
from fasttrain.cli.requests import TuneRequest, with_options
from fasttrain.config.options import OPTIONS

NAME = "tune"


def tune(ctx: typer.Context, **given: Any) -> int:
    """Find which levers make a training script faster and keep its results right."""
    from fasttrain.cli.tuning import perform  # deferred: --help doesn't need it

    return perform(line_of(TuneRequest, ctx, given))


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME, cls=RunCommand)(with_options(tune, TuneRequest, OPTIONS))
