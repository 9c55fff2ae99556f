"""The command ``fasttrain``: its sub-commands, and the one place where errors are printed."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, cast

import typer

from fasttrain import __version__
from fasttrain.cli import doctor, init, job, kill, ps, report, run, slurm
from fasttrain.cli.usage import translate
from fasttrain.spec.errors import ExitCode, FasttrainError

COMMANDS = (run, slurm, job, ps, kill, doctor, init, report)
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
    """Give the application with all its commands."""
    app = typer.Typer(
        name="fasttrain",
        no_args_is_help=True,
        add_completion=False,  # completions/ holds static ones, which start no Python
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # see GroupedCommand
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in COMMANDS:
        command.register(app)
    return app


def main(argv: list[str]) -> int:
    """Run one command line and give its exit code; every error is printed here, once."""
    if sys.stderr is None:  # closed by the caller: what fasttrain would say has nowhere to go
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as we live
    try:
        code = build()(args=argv, prog_name="fasttrain", standalone_mode=False)
    except FasttrainError as error:
        return _tell(error)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except USAGE_ERROR as error:
        return _tell(translate(error, argv, {command.NAME for command in COMMANDS}))
    except BrokenPipeError:
        # Our reader went away, as with `fasttrain run --dry-run | head`: nothing is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # noqa: BLE001 - the last line of defence, which tells all it knows
        traceback.print_exc()
        sys.stderr.write("error: this is a bug in fasttrain; please report the lines above\n")
        return ExitCode.BUG
    return code if isinstance(code, int) else 0


def _tell(error: FasttrainError) -> int:
    sys.stderr.write(f"{error}\n")
    return int(error.exit_code)
