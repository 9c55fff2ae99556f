"""``fasttrain slurm``: its arguments and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from fasttrain.cli.commands.run import RunCommand, line_of
from fasttrain.cli.options import with_options
from fasttrain.cli.typed import CommandLine
from fasttrain.config.options import OPTIONS, SLURM_OPTIONS
from fasttrain.planning.slurm.job import DECIDED_BY_SLURM

NAME = "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest(CommandLine):
    """The arguments and options of ``fasttrain slurm``, but for those of the two tables."""

    command: ClassVar[str] = NAME

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT] [ARGS]... [-- ARGS...]",
            help="The training script (or that of fasttrain.yaml) and its own arguments.",
            show_default=False,
        ),
    ] = None
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job's end; exit as the script did.")
    ] = False
    follow: Annotated[
        bool, typer.Option("--follow", help="As --wait, and show rank 0's output and the state.")
    ] = False
    check: Annotated[
        bool, typer.Option("--check", help="Find what would fail after hours; send nothing.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script; send nothing.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False


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
