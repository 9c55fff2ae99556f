"""``fasttrain slurm``: what it takes on the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fasttrain.cli.commands.run import (
    BEHIND,
    TYPED,
    ConfigFile,
    Module,
    NoPython,
    Preset,
    RunCommand,
)
from fasttrain.cli.options import with_options
from fasttrain.config.options import OPTIONS, SLURM_OPTIONS
from fasttrain.planning.slurm.job import DECIDED_BY_SLURM

NAME = "slurm"


def slurm(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT] [ARGS]... [-- ARGS...]",
            help="The training script, which fasttrain.yaml may name instead, and its arguments.",
            show_default=False,
        ),
    ] = None,
    module: Module = None,
    no_python: NoPython = False,
    config: ConfigFile = None,
    preset: Preset = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until the job has ended; exit as the script did.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="As --wait, and show rank 0's output and the state.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Find what would fail after hours; send nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script; send nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what is told as JSON.")] = False,
    **flags: Any,
) -> int:
    """Run a training script on a SLURM cluster, as fasttrain run does on one machine."""
    from fasttrain.cli.submitting import SlurmRequest, perform  # only now: --help needs none of it
    from fasttrain.cli.target import Starts

    return perform(
        SlurmRequest(
            words=tuple(words or ()),
            behind=ctx.meta[BEHIND],
            typed=ctx.meta[TYPED],
            starts=Starts(module, no_python=no_python, command=NAME),
            config=config,
            preset=preset,
            wait=wait,
            follow=follow,
            check=check,
            dry_run=dry_run,
            json=json,
            flags=flags,
        )
    )


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    decided = {*DECIDED_BY_SLURM, *(spec.name for spec in SLURM_OPTIONS)}
    offered = [spec for spec in OPTIONS if spec.name not in decided]
    app.command(NAME, cls=RunCommand)(with_options(slurm, (*SLURM_OPTIONS, *offered)))
