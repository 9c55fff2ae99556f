"""The arguments and options of ``run`` and ``slurm``, declared once.

typer's parameters are made from them, and so is the list of flags by which fasttrain tells its own
words on a command line from the script's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The arguments and options that ``run`` and ``slurm`` share.

    Attributes:
        command: Name of the sub-command.
        words: Words without a dash: the script and its own arguments.
        passed_on: Words after ``--``.
        typed: All words, as they were typed.
        flags: Options of `Settings`, and on SLURM of `SlurmSettings`; None if not given.
    """

    command: ClassVar[str] = "run"

    words: list[str] | None = None
    passed_on: tuple[str, ...]
    typed: tuple[str, ...]
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")
    ] = None
    no_python: Annotated[
        bool, typer.Option("--no-python", help="SCRIPT is any command; no lever reaches it.")
    ] = False
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Configuration file (default: fasttrain.yaml)."),
    ] = None
    preset: Annotated[
        str | None, typer.Option(metavar="exact|fast|max", help="A named set of options.")
    ] = None
    flags: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(CommandLine):
    """The arguments and options of ``fasttrain run``, but for those of `Settings`."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]... [-- ARGS...]",
            help="The training script and its own arguments; those with a dash go after --.",
            show_default=False,
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan as a shell script; start nothing.")
    ] = False
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Print every decision with reason and source; start nothing."
        ),
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print the plan or the receipt as JSON.")] = (
        False
    )
    machine: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Plan for a described machine (with --dry-run)."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest(CommandLine):
    """The arguments and options of ``fasttrain slurm``, but for those of the two tables."""

    command: ClassVar[str] = "slurm"

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
