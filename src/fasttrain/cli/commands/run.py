"""``fasttrain run``: what it takes on the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fasttrain.cli.options import GroupedCommand, with_options
from fasttrain.cli.typed import as_ours, split
from fasttrain.cli.usage import unknown_option

NAME = "run"
BEHIND, TYPED = "words behind --", "words as typed"  # keys of what the parser passes on

# What every command takes that starts a script.
Module = Annotated[
    str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")
]
NoPython = Annotated[
    bool, typer.Option("--no-python", help="SCRIPT is any command; no lever reaches it.")
]
ConfigFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Configuration file (default: fasttrain.yaml).")
]
Preset = Annotated[
    str | None, typer.Option(metavar="exact|fast|max", help="A named set of options.")
]


class RunCommand(GroupedCommand):
    """Keeps what stands behind ``--`` away from the parser: it is the script's, byte for byte."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Cut the words at the first ``--``."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[TYPED], ctx.meta[BEHIND] = tuple(args), tuple(args[at + 1 :])
        typed = split(args, ctx.info_name or NAME)
        if typed.kind == "script" and any(group[0] == "-m" for group in typed.after):
            raise unknown_option("-m", args, ctx.info_name or NAME)
        for word in args[:at]:
            # The parser would take `-momentum` for `-m omentum`; python's `-mpkg` isn't offered.
            if word.startswith("-m") and len(word) > 2:
                raise unknown_option(word, args, ctx.info_name or NAME)
        return super().parse_args(ctx, [*map(as_ours, args[:at])])


def run(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]... [-- ARGS...]",
            help="The training script and its own arguments; those with a dash stand behind --.",
            show_default=False,
        ),
    ] = None,
    module: Module = None,
    no_python: NoPython = False,
    config: ConfigFile = None,
    preset: Preset = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan as a shell script; start nothing.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print every decision, why and from where; start nothing."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the plan or the receipt as JSON.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Plan for a described machine (with --dry-run)."),
    ] = None,
    **flags: Any,
) -> int:
    """Run a training script with mixed precision, compilation and fused optimizers applied."""
    # Only now: --help needs none of it.
    from fasttrain.cli.running import Request, perform
    from fasttrain.cli.target import Starts

    return perform(
        Request(
            words=tuple(words or ()),
            behind=ctx.meta[BEHIND],
            typed=ctx.meta[TYPED],
            starts=Starts(module, no_python=no_python),
            config=config,
            preset=preset,
            dry_run=dry_run,
            explain=explain,
            json=json,
            machine=machine,
            flags=flags,
        )
    )


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME, cls=RunCommand)(with_options(run))
