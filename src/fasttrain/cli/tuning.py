"""Perform ``fasttrain tune``: plan and start a run that compares levers, and print the result."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fasttrain.cli.console import envelope
from fasttrain.cli.requests import TuneRequest
from fasttrain.cli.running import choose_python, make_invocation, print_plan, same_syntax
from fasttrain.cli.tuned import save
from fasttrain.cli.typed import choose_target, resolve_options
from fasttrain.config.environ import read_environ
from fasttrain.files import load, remove_whole
from fasttrain.hardware.host import Host
from fasttrain.hardware.host_state import look_around
from fasttrain.hardware.probe import probe_machine
from fasttrain.launch.output.display import QuietDisplay
from fasttrain.launch.preflight import check_target
from fasttrain.launch.start import working_directory
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.machine import Machine
from fasttrain.model.places import COMPILED_VARIABLE, scratch_folder
from fasttrain.model.plan import Invocation, LaunchPlan
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import TUNING_FILE, Tuning, TuningReport
from fasttrain.planning.explain import mask_plan
from fasttrain.planning.plan import make_plan
from fasttrain.planning.tuning import TuningPlan, plan_tuning

_BUDGET = re.compile(r"([0-9]{1,6})(s|m|h|)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600}
LEAST_S = 10
OVERTIME_S = 5.0  # for a step, or a compilation, that is not over in time


def perform(request: TuneRequest) -> int:
    """Perform the command; return the script's exit code if it failed, 69 if nothing was found."""
    budget_s = read_budget(request.budget)
    environ = read_environ()
    cwd = working_directory()
    wanted = resolve_options(request, environ)
    target = choose_target(request, wanted)
    python = choose_python(target, wanted.settings, environ)
    check_target(target, str(cwd), parsed=same_syntax(python.other))
    invocation = make_invocation(target, wanted.settings, environ, python)
    machine = probe_machine(environ, python.other)

    def make(settings: Settings) -> LaunchPlan:
        return make_plan(settings, machine, invocation)

    scratch = "" if request.keep_writes else str(scratch_folder(invocation.run_id))
    tuned = plan_tuning(make, wanted.settings, Tuning(budget_s, scratch, ()))
    tuned = replace(tuned, plan=_keeping(tuned.plan))
    if request.dry_run:
        print_plan(tuned.plan, invocation, explain=False, as_json=request.json)
        return 0
    quiet = wanted.settings.quiet.value
    report, code = _start(tuned, invocation, quiet=quiet, json=request.json)
    if report.says_something and code == 0:
        _save(report, tuned.plan, machine, invocation)
    return code


def read_budget(text: str) -> float:
    """Return a budget in seconds.

    Raises:
        FasttrainError: ``tune-budget`` if it is no time, or too short to compare anything.
    """
    found = _BUDGET.fullmatch(text)
    budget_s = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if budget_s < LEAST_S:
        raise FasttrainError(
            f"--budget {text!r} is no time to compare in",
            why=f"it takes a number of at least {LEAST_S} s with s, m or h behind it",
            fix="--budget 5m",
            slug="tune-budget",
            exit_code=ExitCode.USAGE,
        )
    return float(budget_s)


def _keeping(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan with the folders in which the worker's own writes are real."""
    assert plan.tuning is not None
    cache = [v.value for v in plan.environment if v.name == COMPILED_VARIABLE and v.value]
    return replace(plan, tuning=replace(plan.tuning, keep=(plan.run_dir, *cache)))


class _Budget:
    """Ends a run that hasn't ended itself when its budget was over.

    Attributes:
        over: Whether it has.
    """

    def __init__(self, budget_s: float) -> None:
        self.over = False
        self._until_s = time.monotonic() + budget_s + OVERTIME_S

    def heard(self, signum: int) -> None:
        """Do nothing: the run ends by itself."""

    def tick(self) -> None:
        """End the run once, as a signal from outside would."""
        if not self.over and time.monotonic() > self._until_s:
            self.over = True
            os.kill(os.getpid(), signal.SIGTERM)


class _Progress:
    """Tells which levers are being compared.

    Args:
        run_dir: Where the worker writes what it does.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._told: tuple[str, ...] = ()
        self._looked_s = 0.0

    def heard(self, signum: int) -> None:
        """Do nothing: the run tells of it."""

    def tick(self) -> None:
        """Look once a second, and tell of what is new."""
        if time.monotonic() - self._looked_s < 1.0:
            return
        self._looked_s = time.monotonic()
        report = _read(self._run_dir)
        if report.comparing and report.comparing != self._told:
            self._told = report.comparing
            sys.stderr.write(f"fasttrain: step {report.steps:,}: {' and '.join(self._told)} ...\n")


class _Silent(QuietDisplay):
    """Keeps the script's output to its log, where it can be read."""

    def write(self, descriptor: int, data: bytes) -> None:
        """Write nothing."""


def _start(
    tuned: TuningPlan, invocation: Invocation, *, quiet: bool, json: bool
) -> tuple[TuningReport, int]:
    from fasttrain.cli.cards.crash import print_crash
    from fasttrain.cli.cards.tuning import print_tuning
    from fasttrain.launch.node_run import Observers
    from fasttrain.launch.start import start

    plan = tuned.plan
    assert plan.tuning is not None
    if not quiet:
        names = ", ".join(tuned.levers)
        writes = "thrown away" if plan.tuning.scratch else "kept"
        sys.stderr.write(
            f"fasttrain: comparing {names} for at most {plan.tuning.budget_s:.0f} s;"
            f" what the script writes is {writes}\n"
        )
    budget = _Budget(plan.tuning.budget_s)
    watches = (budget,) if quiet else (budget, _Progress(Path(plan.run_dir)))
    around = partial(look_around, Host(invocation.environ))
    observers = Observers(_Silent(), around, watches=watches)
    masked = mask_plan(plan, invocation.environ)
    with _scratch(plan.tuning.scratch):
        receipt = start(plan, masked, invocation.environ, observers)
    report = _read(Path(plan.run_dir))
    if json:
        sys.stdout.write(envelope("tuning", report) + "\n")
    else:
        if receipt.crash and not budget.over:
            print_crash(receipt.crash, receipt.run_dir, brief=quiet)
        print_tuning(report, tuned, receipt.run_dir)
    if receipt.exit_code and not budget.over:
        return report, receipt.exit_code
    return report, 0 if report.says_something else int(ExitCode.UNAVAILABLE)


def _save(report: TuningReport, plan: LaunchPlan, machine: Machine, invocation: Invocation) -> None:
    try:
        save(report, plan, machine, invocation)
    except OSError as error:
        sys.stderr.write(f"fasttrain: warning: the result isn't kept: {error.strerror}\n")


@contextmanager
def _scratch(folder: str) -> Iterator[None]:
    """Have a scratch folder during a run, if it needs one."""
    if not folder:
        yield
        return
    try:
        Path(folder).mkdir(mode=0o700)
    except OSError as error:
        raise FasttrainError(
            "what the script writes can't be kept apart here",
            why=f"{folder} can't be made: {error.strerror}",
            fix="--keep-writes, if the script may write its files while it is tuned",
            slug="tune-writes",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    try:
        yield
    finally:
        try:
            remove_whole(Path(folder))
        except OSError as error:
            sys.stderr.write(f"fasttrain: warning: {folder} can't be removed: {error.strerror}\n")


def _read(run_dir: Path) -> TuningReport:
    try:
        return load(TuningReport, run_dir / TUNING_FILE)
    except (OSError, CodecError):  # the script never imported torch, or has written no report yet
        return TuningReport("running", 0, 0.0)
