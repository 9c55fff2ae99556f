"""``fasttrain kill``: ends runs on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from fasttrain.config.options import BY_NAME

NAME = "kill"
GRACE = BY_NAME["shutdown_timeout"]


def kill(
    run_id: Annotated[
        str | None,
        typer.Argument(
            help="A run as `fasttrain ps` names it, any part of that, or its directory.",
            show_default=False,
        ),
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="End all that `fasttrain ps` lists.")] = (
        False
    ),
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            metavar="S", min=0, help="Seconds to save in, before SIGKILL; at most those of the run."
        ),
    ] = int(str(GRACE.default)),
) -> int:
    """End runs of yours: SIGTERM, time to save, then SIGKILL."""
    from fasttrain.cli.runs import chosen, end_run, local_runs  # only now, as in ps

    for run in chosen(local_runs(), run_id, all_runs=all_runs):
        typer.echo(end_run(run, shutdown_timeout))
    return 0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME)(kill)
