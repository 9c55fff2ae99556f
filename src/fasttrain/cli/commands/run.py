"""``fasttrain run``: its arguments and options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import typer

from fasttrain.cli.requests import CommandLine, GroupedCommand, RunRequest, with_options
from fasttrain.cli.typed import as_ours, split, unknown_option
from fasttrain.config.options import OPTIONS

NAME = "run"
PASSED_ON, TYPED = "words after --", "words as typed"  # keys of what the parser puts into ctx.meta

Line = TypeVar("Line", bound=CommandLine)


class RunCommand(GroupedCommand):
    """Keeps the words after ``--`` from the parser: they are the script's, byte for byte."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before the first ``--``."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[TYPED], ctx.meta[PASSED_ON] = tuple(args), tuple(args[at + 1 :])
        typed = split(args, ctx.info_name or NAME)
        if typed.kind == "script" and any(group[0] == "-m" for group in typed.after):
            raise unknown_option("-m", args, ctx.info_name or NAME)
        for word in args[:at]:
            # The parser would read `-momentum` as `-m omentum`; unlike python, we have no `-mpkg`.
            if word.startswith("-m") and len(word) > 2:
                raise unknown_option(word, args, ctx.info_name or NAME)
        return super().parse_args(ctx, [*map(as_ours, args[:at])])


def run(ctx: typer.Context, **given: Any) -> int:
    """Run a training script with mixed precision, compilation and fused optimizers applied."""
    from fasttrain.cli.running import perform  # deferred: --help doesn't need it

    return perform(line_of(RunRequest, ctx, given))


def line_of(kind: type[Line], ctx: typer.Context, given: dict[str, Any]) -> Line:
    """Return the request of a command that starts a script, from all that typer parsed."""
    names = {field.name for field in fields(kind)}
    return kind(
        passed_on=ctx.meta[PASSED_ON],
        typed=ctx.meta[TYPED],
        flags={name: value for name, value in given.items() if name not in names},
        **{name: value for name, value in given.items() if name in names},
    )


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(NAME, cls=RunCommand)(with_options(run, RunRequest, OPTIONS))
