"""``fasttrain doctor``: what it takes on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

NAME = "doctor"


def doctor(
    script: Annotated[
        str | None,
        typer.Argument(
            help="A training script: tells what fasttrain would do with it here.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print all of it as JSON, as run --machine takes it.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a report for a bug tracker, names masked.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Start no torch: under a second.")] = False,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure the devices as well: under a minute.")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what can safely be mended here.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Examine for this Python; default: the one that run takes.",
            show_default=False,
        ),
    ] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks.")] = False,
    only: Annotated[
        str | None, typer.Option(metavar="CHECK,...", help="Make these checks alone.")
    ] = None,
    skip: Annotated[
        str | None, typer.Option(metavar="CHECK,...", help="Leave these checks out.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Judge a recorded machine instead of this one."),
    ] = None,
) -> int:
    """Tell what this machine has, what is wrong with it, and how to mend it."""
    from fasttrain.cli.examining import Request, perform  # only now: --help needs none of it

    return perform(
        Request(
            script=script,
            form="json" if json else "markdown" if markdown else "screen",
            quick=quick,
            bench=bench,
            fix=fix,
            python=python,
            list_checks=list_checks,
            only=_slugs(only),
            skip=_slugs(skip),
            machine=machine,
        )
    )


def _slugs(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME)(doctor)
