"""Perform ``fasttrain run``: make a plan; start it, or print it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from fasttrain.cli import history
from fasttrain.cli.console import envelope
from fasttrain.cli.requests import RunRequest
from fasttrain.cli.tuned import holds_for, plan_run, results_path
from fasttrain.cli.typed import choose_target, resolve_options
from fasttrain.config.environ import read_environ
from fasttrain.hardware.host import Host
from fasttrain.hardware.host_state import look_around
from fasttrain.hardware.interpreter import Locate, ask_interpreter
from fasttrain.hardware.machine_file import read_machine
from fasttrain.hardware.probe import probe_machine
from fasttrain.launch.preflight import check_target
from fasttrain.launch.start import active_elsewhere, read_invocation, working_directory
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.hang import Hang
from fasttrain.model.machine import Interpreter
from fasttrain.model.outcome import Receipt
from fasttrain.model.plan import Invocation, LaunchPlan, ScriptFacts, Target
from fasttrain.model.settings import Settings
from fasttrain.planning.explain import Row, decisions, mask_plan, shell_script
from fasttrain.planning.processes import ChosenPython, decide_python
from fasttrain.source.read import read_script

# Choose the Python that runs the script: query the candidate, and let planning decide.


def choose_python(target: Target, settings: Settings, environ: Mapping[str, str]) -> ChosenPython:
    """Return the named Python, that of the active environment, or fasttrain's own.

    Raises:
        FasttrainError: ``python-unusable`` if a named one can't run the script.
    """
    if target.kind == "command":
        return ChosenPython()
    named, active = settings.python, active_elsewhere(environ)
    asked: Interpreter | None = None
    if named.value:
        asked = _named(named.value, environ)
    elif active:
        asked = ask_interpreter(str(Path(active.partition("=")[2], "bin", "python").absolute()))
    return decide_python(named, active, None if asked and _own(asked) else asked)


def same_syntax(other: Interpreter | None) -> bool:
    """Return True if an interpreter has the syntax of this Python, so that we can parse for it."""
    return other is None or other.version.split(".")[:2] == list(map(str, sys.version_info[:2]))


def _named(word: str, environ: Mapping[str, str]) -> Interpreter:
    found = shutil.which(word, path=environ.get("PATH")) or word
    return ask_interpreter(str(Path(found).absolute()))


def _own(asked: Interpreter) -> bool:
    there = Path(asked.prefix)
    # Two versions may share one prefix, such as /usr.
    same = asked.version == ".".join(map(str, sys.version_info[:3]))
    return same and bool(asked.prefix) and there.is_dir() and there.samefile(sys.prefix)


# Perform ``fasttrain run``: make a plan; start it, or print it.


def perform(request: RunRequest) -> int:
    """Perform the command and return the exit code: the script's own, if one ran."""
    environ = read_environ()
    cwd = working_directory()
    wanted = resolve_options(request, environ)
    target = choose_target(request, wanted)
    if request.keep_writes and not request.prove:
        raise _nothing_thrown_away()
    planning_only = request.dry_run or request.explain
    if request.machine and not planning_only:
        raise _described_machine(request.machine)
    python = choose_python(target, wanted.settings, environ)
    check_target(target, str(cwd), parsed=same_syntax(python.other))
    # A result of tuning may make several processes of one.
    several = _may_be_several(wanted.settings) or results_path(str(cwd)).exists()
    invocation = make_invocation(target, wanted.settings, environ, python, several=several)
    # The machine is examined last: a mistake in the command line needs no probe.
    described = read_machine(Path(request.machine)) if request.machine else None
    machine = described or probe_machine(environ, python.other)
    if request.prove and not planning_only:
        from fasttrain.cli.proving import prove

        return prove(request, wanted.settings, machine, invocation)
    plan = plan_run(wanted.settings, machine, invocation)
    if planning_only:
        print_plan(plan, invocation, explain=request.explain, as_json=request.json)
        return 0

    of = holds_for(plan, machine, invocation)  # the script may be edited while it runs

    def remember(receipt: Receipt) -> None:
        if of is not None:
            with suppress(OSError):  # a history is a help, and no run fails without it
                history.remember(receipt, plan, of, invocation.cwd)

    show = Shown(quiet=wanted.settings.quiet.value, as_json=request.json)
    return _start(plan, invocation, show, remember)


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a run is shown.

    Attributes:
        quiet: Nothing but errors.
        as_json: The receipt as JSON.
    """

    quiet: bool
    as_json: bool


def make_invocation(
    target: Target,
    settings: Settings,
    environ: Mapping[str, str],
    python: ChosenPython,
    *,
    several: bool,
) -> Invocation:
    """Return the circumstances of this call, with what the source says if it matters.

    Args:
        target: What is run.
        settings: What the user wants.
        environ: The user's environment.
        python: The interpreter that runs it.
        several: Whether there may be several processes; only then must the source be read.
    """
    locate = Locate(python.other) if python.other else find_spec
    cwd = str(working_directory())
    facts = read_script(target, cwd, environ, locate) if several else ScriptFacts()
    found = read_invocation(target, settings, environ, facts)
    path = python.other.path if python.other else found.python
    return replace(found, python=path, python_decision=python.decision, python_note=python.note)


def _may_be_several(settings: Settings) -> bool:
    """Return True if the user may have asked for several processes."""
    asked = (settings.gpus.value, settings.nproc_per_node.value, settings.rdzv_endpoint.value)
    return settings.nodes.value != "1" or any(value is not None for value in asked)


def _nothing_thrown_away() -> FasttrainError:
    return FasttrainError(
        "--keep-writes is for runs that prove",
        why="any other run lets the script write its files",
        fix="leave it out, or add --prove",
        slug="keep-writes",
        exit_code=ExitCode.USAGE,
    )


def _described_machine(file: str) -> FasttrainError:
    return FasttrainError(
        "a described machine can't run anything",
        why=f"--machine {file} describes another machine than this one",
        fix="add --dry-run, or leave --machine out",
        slug="machine-dry-run",
        exit_code=ExitCode.USAGE,
    )


def print_plan(plan: LaunchPlan, invocation: Invocation, *, explain: bool, as_json: bool) -> None:
    """Print a plan to stdout: as a shell script, its decisions, or as JSON."""
    if as_json:
        masked = mask_plan(plan, invocation.environ)
        kind, value = ("decisions", decisions(masked)) if explain else ("plan", masked)
        text = envelope(kind, value) + "\n"
    elif explain:
        _print_decisions(decisions(mask_plan(plan, invocation.environ)))
        return
    else:
        text = shell_script(plan, invocation.environ)
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.flush()


def _print_decisions(rows: tuple[Row, ...]) -> None:
    """Print every decision with its reason and source to stdout."""
    from rich.table import Table
    from rich.text import Text

    from fasttrain.cli.console import stdout_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("decision", "value", "reason", "source"):
        table.add_column(title, overflow="fold")
    for row in rows:
        # Text, not str: square brackets in a value would be markup.
        table.add_row(*(Text(cell) for cell in (row.topic, row.value, row.reason, row.source)))
    stdout_console(width=160).print(table)


def _start(
    plan: LaunchPlan, invocation: Invocation, show: Shown, remember: Callable[[Receipt], None]
) -> int:
    from fasttrain.cli.cards.crash import print_crash, print_hang
    from fasttrain.cli.cards.progress import choose_display
    from fasttrain.cli.cards.receipt import print_receipt
    from fasttrain.launch.node_run import Observers
    from fasttrain.launch.start import start

    quiet, as_json = show.quiet, show.as_json
    for warning in () if quiet else plan.warnings:
        sys.stderr.write(f"fasttrain: warning: {warning}\n")
    if plan.python and not quiet:
        why = f"{plan.python.reason} ({plan.python.source})"
        sys.stderr.write(f"fasttrain: running with {plan.python.value}: {why}\n")
    display = choose_display(quiet=quiet)

    def on_hang(hang: Hang) -> None:
        if hang.action == "stop" or not quiet:  # a hang that ends the run is an error
            display.close()
            print_hang(hang, plan.run_dir)

    observers = Observers(display, partial(look_around, Host(invocation.environ)), on_hang)
    receipt = start(plan, mask_plan(plan, invocation.environ), invocation.environ, observers)
    remember(receipt)
    if as_json:
        sys.stderr.write(envelope("receipt", receipt) + "\n")
    elif receipt.crash:  # before the receipt, so that the cause follows the traceback
        print_crash(receipt.crash, receipt.run_dir, brief=quiet)
    if not (as_json or quiet):
        print_receipt(receipt)
    if plan.strict and receipt.exit_code == 0 and receipt.unmet:
        raise FasttrainError(
            "not everything that was asked for took effect",
            why="; ".join(receipt.unmet),
            fix="leave that lever out, or run without --strict",
            slug="strict",
        )
    return ExitCode.INTERRUPTED if receipt.interrupted else receipt.exit_code
