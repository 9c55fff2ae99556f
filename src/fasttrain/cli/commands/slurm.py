"""``fasttrain slurm``: its arguments and options."""

from __future__ import annotations

from typing import Any

import typer

from fasttrain.cli.commands.run import RunCommand, line_of
from fasttrain.cli.requests import SlurmRequest, with_options
from fasttrain.config.options import OPTIONS, SLURM_OPTIONS
from fasttrain.planning.slurm_job import DECIDED_BY_SLURM

NAME = "slurm"


def slurm(ctx: typer.Context, **given: Any) -> int:
    """Run a training script on a SLURM cluster, as fasttrain run does on one machine."""
    from fasttrain.cli.submitting import perform  # deferred: --help doesn't need it

    return perform(line_of(SlurmRequest, ctx, given))


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    decided = {*DECIDED_BY_SLURM, *(spec.name for spec in SLURM_OPTIONS)}
    offered = [spec for spec in OPTIONS if spec.name not in decided]
    options = (*SLURM_OPTIONS, *offered)
    app.command(NAME, cls=RunCommand)(with_options(slurm, SlurmRequest, options))
