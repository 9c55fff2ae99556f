"""``fasttrain ps``: the runs on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

NAME = "ps"


def ps(
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> int:
    """List your runs on this machine, including those whose launcher is dead."""
    from fasttrain.cli.runs import local_runs, run_table  # deferred: --help doesn't need it

    runs = local_runs()
    if json:
        from fasttrain.cli.console import envelope

        typer.echo(envelope("runs", runs))
    else:
        run_table(runs)
    return 0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME)(ps)
