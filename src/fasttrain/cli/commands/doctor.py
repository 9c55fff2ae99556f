"""``fasttrain doctor``: its argument and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fasttrain.cli.requests import with_options

NAME = "doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """The argument and options of ``fasttrain doctor``."""

    script: Annotated[
        str | None,
        typer.Argument(
            help="A training script: show what fasttrain would do with it here.",
            show_default=False,
        ),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; run --machine takes it.")
    ] = False
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a report for a bug tracker, names masked.")
    ] = False
    quick: Annotated[bool, typer.Option("--quick", help="Start no torch: under a second.")] = False
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure the devices as well: under a minute.")
    ] = False
    fix: Annotated[bool, typer.Option("--fix", help="Fix what can safely be fixed here.")] = False
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Examine for this Python; default: the one that run takes.",
            show_default=False,
        ),
    ] = None
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks.")] = False
    only: Annotated[
        str | None, typer.Option(metavar="CHECK,...", help="Make only these checks.")
    ] = None
    skip: Annotated[
        str | None, typer.Option(metavar="CHECK,...", help="Leave out these checks.")
    ] = None
    machine: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Judge a recorded machine instead of this one."),
    ] = None


def doctor(**given: Any) -> int:
    """Show what this machine has, what is wrong with it, and how to fix it."""
    from fasttrain.cli.examining import perform  # deferred: --help doesn't need it

    return perform(DoctorRequest(**given))


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME)(with_options(doctor, DoctorRequest))
