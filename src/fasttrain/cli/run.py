"""``fasttrain run``: from the words typed to a plan, and from the plan to a receipt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from fasttrain.cli.envelope import envelope
from fasttrain.cli.options import with_options
from fasttrain.cli.usage import unknown_option
from fasttrain.config.environ import read_environ
from fasttrain.config.resolve import Resolved, resolve
from fasttrain.hardware.machine_file import read_machine
from fasttrain.hardware.probe import probe_machine
from fasttrain.launch.invocation import read_invocation
from fasttrain.launch.preflight import check_target
from fasttrain.planning.dry_run import shell_script
from fasttrain.planning.explain import decisions
from fasttrain.planning.plan import make_plan
from fasttrain.planning.secrets import mask_plan
from fasttrain.spec.errors import ExitCode, FasttrainError
from fasttrain.spec.plan import Invocation, LaunchPlan, Target

BEHIND = "words behind --"


class RunCommand(typer.core.TyperCommand):
    """Keeps what stands behind ``--`` away from the parser: it is the script's, byte for byte."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Cut the words at the first ``--``."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[BEHIND] = tuple(args[at + 1 :])
        for word in args[:at]:
            # The parser would take `-momentum` for `-m omentum`; python's `-mpkg` isn't offered.
            if word.startswith("-m") and len(word) > 2:  # noqa: PLR2004
                raise unknown_option(word, args)
        return super().parse_args(ctx, args[:at])


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
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")
    ] = None,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="SCRIPT is any command; no lever reaches it.")
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Configuration file.", show_default="fasttrain.yaml"),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="exact|fast|max", help="A named set of options.")
    ] = None,
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
    environ = read_environ()
    cwd = Path.cwd()
    wanted = resolve(flags, environ=environ, cwd=cwd, config=config, preset=preset)
    target = _target(tuple(words or ()), ctx.meta[BEHIND], module, no_python, wanted)
    planning_only = dry_run or explain
    if machine and not planning_only:
        raise _described_machine(machine)
    check_target(target, str(cwd))
    invocation = read_invocation(target, wanted.settings, environ)
    described = read_machine(Path(machine)) if machine else probe_machine(environ)
    plan = make_plan(wanted.settings, described, invocation)
    if planning_only:
        _print_plan(plan, invocation, explain=explain, as_json=json)
        return 0
    return _start(plan, invocation, quiet=wanted.settings.quiet.value, as_json=json)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(cls=RunCommand)(with_options(run))


def _target(
    words: tuple[str, ...],
    behind: tuple[str, ...],
    module: str | None,
    no_python: bool,
    wanted: Resolved,
) -> Target:
    if module and no_python:
        raise FasttrainError(
            "-m and --no-python exclude each other",
            why="a module is run by Python, and --no-python says that there is none",
            fix="leave one of them out",
            slug="target-contradiction",
            exit_code=ExitCode.USAGE,
        )
    if module:
        return Target("module", module, (*words, *behind))
    kind = "command" if no_python else "script"
    if words:
        return Target(kind, words[0], (*words[1:], *behind))  # type: ignore[arg-type]
    if no_python and behind:
        return Target("command", behind[0], behind[1:])
    if wanted.script is None:
        raise FasttrainError(
            "there is no script to run",
            why="neither the command line nor a fasttrain.yaml names one",
            fix="fasttrain run train.py, or write `script: train.py` into fasttrain.yaml",
            slug="script-missing",
            exit_code=ExitCode.USAGE,
        )
    return Target(kind, wanted.script, (*wanted.args, *behind))  # type: ignore[arg-type]


def _described_machine(file: str) -> FasttrainError:
    return FasttrainError(
        "a described machine can't run anything",
        why=f"--machine {file} stands for another machine than this one",
        fix="add --dry-run, or leave --machine out",
        slug="machine-dry-run",
        exit_code=ExitCode.USAGE,
    )


def _print_plan(
    plan: LaunchPlan, invocation: Invocation, *, explain: bool, as_json: bool
) -> None:
    if as_json:
        kind, value = ("decisions", decisions(plan)) if explain else ("plan", mask_plan(plan))
        text = envelope(kind, value) + "\n"
    elif explain:
        from fasttrain.cli.table import decision_table

        decision_table(decisions(plan))
        return
    else:
        text = shell_script(plan, invocation.environ)
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.flush()


def _start(plan: LaunchPlan, invocation: Invocation, *, quiet: bool, as_json: bool) -> int:
    from fasttrain.cli.card import print_receipt
    from fasttrain.cli.progress import choose_display
    from fasttrain.launch.start import start

    for warning in () if quiet else plan.warnings:
        sys.stderr.write(f"fasttrain: warning: {warning}\n")
    receipt = start(plan, mask_plan(plan), invocation.environ, choose_display(quiet=quiet))
    if as_json:
        sys.stderr.write(envelope("receipt", receipt) + "\n")
    elif not quiet:
        print_receipt(receipt)
    if plan.strict and receipt.exit_code == 0 and receipt.unmet:
        raise FasttrainError(
            "not everything that was asked for took effect",
            why="; ".join(receipt.unmet),
            fix="leave that lever out, or run without --strict",
            slug="strict",
        )
    return receipt.exit_code
