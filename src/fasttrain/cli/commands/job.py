"""``fasttrain job``: the jobs that fasttrain slurm has sent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from fasttrain.cli.requests import with_options

NAME = "job"


class Action(StrEnum):
    """What to do with a job."""

    LIST = "list"
    SHOW = "show"
    LOGS = "logs"
    WAIT = "wait"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class JobCommand:
    """The arguments and options of ``fasttrain job``."""

    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)]
    job_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="Number of the job (default: the latest of this folder).",
            show_default=False,
        ),
    ] = None
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="With logs: go on until the job has ended.")
    ] = False
    rank: Annotated[
        int, typer.Option(metavar="RANK", min=0, help="With logs: whose output (default: 0).")
    ] = 0
    json: Annotated[bool, typer.Option("--json", help="With list, show and wait: print JSON.")] = (
        False
    )


def job(**given: Any) -> int:
    """List, show, follow, await or cancel the jobs that fasttrain slurm has sent."""
    from fasttrain.cli.jobs import perform  # deferred: --help doesn't need it

    return perform(JobCommand(**given))


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME)(with_options(job, JobCommand))
