"""``fasttrain kill``: end runs on this machine."""

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
            help="A run's name from `fasttrain ps`, any part of it, or its directory.",
            show_default=False,
        ),
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="End all that `fasttrain ps` lists.")] = (
        False
    ),
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            metavar="S", min=0, help="Seconds to save before SIGKILL; at most the run's own limit."
        ),
    ] = int(str(GRACE.default)),
) -> int:
    """End runs of yours: SIGTERM, time to save, then SIGKILL."""
    from fasttrain.cli.runs import chosen, end_run, local_runs  # deferred, as in ps

    for run in chosen(local_runs(), run_id, all_runs=all_runs):
        typer.echo(end_run(run, shutdown_timeout))
    return 0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME)(kill)
