"""The command ``fasttrain``: its sub-commands, and the one place where errors are printed."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, cast

import typer

from fasttrain import __version__
from fasttrain.cli.commands import doctor, init, job, kill, ps, report, run, slurm, tune
from fasttrain.cli.console import prepare_streams
from fasttrain.cli.typed import translate
from fasttrain.config.environ import read_environ
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.secrets import hide, secret_values

COMMANDS = (run, tune, slurm, job, ps, kill, doctor, init, report)
BUG_NOTE = "error: this is a bug in fasttrain; please report the lines above"
USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__base__)  # typer exports no name for it


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"fasttrain {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run an unmodified PyTorch training script fast, and prove what took effect."""


def build() -> typer.Typer:
    """Return the application with all its commands."""
    app = typer.Typer(
        name="fasttrain",
        add_completion=False,  # completions/ has static ones, which start no Python
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # see GroupedCommand
        # Help is as wide as the terminal, up to a width that is still readable.
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140},
    )
    app.callback()(_root)
    for command in COMMANDS:
        command.register(app)
    return app


def main(argv: list[str]) -> int:
    """Run one command line and return its exit code; every error is printed here, once.

    The code is `ExitCode.INTERRUPTED` itself where ctrl-C ended the command, and the number 130
    where a script has ended with that.
    """
    prepare_streams()
    try:
        code = build()(args=argv or ["--help"], prog_name="fasttrain", standalone_mode=False)
        sys.stdout.flush()  # here, where an error is still reported
    except FasttrainError as error:
        return _report(error, argv)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except USAGE_ERROR as error:
        return _report(translate(error, argv, {command.NAME for command in COMMANDS}), argv)
    except Exception:  # noqa: BLE001 - the last line of defence, which prints all it knows
        sys.stderr.write(_without_secrets(traceback.format_exc(), argv))
        sys.stderr.write(f"{BUG_NOTE}\n")
        return ExitCode.BUG
    return code if isinstance(code, int) else 0


def _report(error: FasttrainError, argv: list[str]) -> int:
    sys.stderr.write(_without_secrets(f"{error}\n", argv))
    return int(error.exit_code)


def _without_secrets(text: str, argv: list[str]) -> str:
    """Return a text with the secrets masked that an error may repeat from the command line."""
    return hide(text, secret_values(read_environ(), argv))
