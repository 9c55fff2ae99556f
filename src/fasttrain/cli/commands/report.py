"""``fasttrain report``: show the receipt of a run that has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from fasttrain.model.places import RUNS_FOLDER

NAME = "report"


def report(
    run_dir: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help=f"Run directory, or any part of a name in {RUNS_FOLDER}/ (default: the latest).",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> int:
    """Show the receipt of a run."""
    # Deferred: --help doesn't need it.
    from fasttrain.launch.receipts import read_hang, read_receipt
    from fasttrain.launch.run_dir.paths import find_run_dir, latest_run_dir
    from fasttrain.launch.start import working_directory

    cwd = working_directory()
    directory = find_run_dir(run_dir, cwd) if run_dir else latest_run_dir(cwd)
    receipt = read_receipt(directory)
    if json:
        from fasttrain.cli.console import envelope

        typer.echo(envelope("receipt", receipt))
    else:
        from fasttrain.cli.cards.crash import print_hang
        from fasttrain.cli.cards.receipt import print_receipt

        if (hang := read_hang(directory)) is not None:
            print_hang(hang, str(directory))
        if receipt.crash:
            from fasttrain.cli.cards.crash import print_crash

            # Output that was on the screen during the run isn't there now.
            print_crash(replace(receipt.crash, shown=False), receipt.run_dir)
        print_receipt(receipt)
    return 0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME)(report)
