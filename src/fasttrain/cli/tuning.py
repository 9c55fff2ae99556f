"""Perform ``fasttrain tune``: plan and start a run that compares levers, and print the result."""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from fasttrain.cli.beside import Children, Silent, scratch_made
from fasttrain.cli.console import envelope
from fasttrain.cli.requests import TuneRequest
from fasttrain.cli.running import choose_python, make_invocation, print_plan, same_syntax
from fasttrain.cli.tuned import holds_for, save
from fasttrain.cli.tuning_settings import END_S, Ground, SettingsSearch
from fasttrain.cli.typed import choose_target, resolve_options
from fasttrain.config.environ import read_environ
from fasttrain.files import load, write_private
from fasttrain.hardware.cpu import physical_cores
from fasttrain.hardware.host import Host
from fasttrain.hardware.host_state import look_around
from fasttrain.hardware.probe import probe_machine
from fasttrain.launch.preflight import check_target
from fasttrain.launch.receipts import trains_in_children
from fasttrain.launch.run_dir.lock import begin, claim
from fasttrain.launch.start import working_directory
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.levers import LEVERS
from fasttrain.model.machine import Machine
from fasttrain.model.outcome import Receipt
from fasttrain.model.places import COMPILED_VARIABLE, scratch_folder
from fasttrain.model.plan import Invocation, LaunchPlan
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import (
    TUNING_FILE,
    TUNING_STATE_FILE,
    UNBOUNDED,
    Compared,
    Ratio,
    TunedFor,
    Tuning,
    TuningReport,
    TuningState,
)
from fasttrain.planning.explain import mask_plan
from fasttrain.planning.plan import make_plan
from fasttrain.planning.process_settings import (
    ProcessSettings,
    plan_process_settings,
    settings_with_kept,
    without_use,
)
from fasttrain.planning.tuning import TuningPlan, plan_tuning

_BUDGET = re.compile(r"([0-9]{1,6})(s|m|h|)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600}
LEAST_S = 10
MOST_IN_VAIN = 2  # starts in a row that ended before anything was timed
VALUE_SHARE, SETTINGS_SHARE = 0.1, 0.4  # of the budget, for a setting's value, and at most for all
LEAST_SETTINGS_S = 30.0  # two runs that start beside each other take some of it
OVERTIME_S = 5.0  # for a step, or a compilation, that is not over in time
NOT_READY = "a compilation, or a step, wasn't over in time"


def perform(request: TuneRequest) -> int:
    """Perform the command; return the script's exit code if it failed, 69 if nothing was found."""
    budget_s = read_budget(request.budget)
    environ = read_environ()
    cwd = working_directory()
    wanted = resolve_options(request, environ)
    target = choose_target(request, wanted)
    python = choose_python(target, wanted.settings, environ)
    check_target(target, str(cwd), parsed=same_syntax(python.other))
    invocation = make_invocation(target, wanted.settings, environ, python, several=True)
    machine = probe_machine(environ, python.other)

    def plan(run_dir: str, tuning: Tuning) -> TuningPlan:
        def make(settings: Settings) -> LaunchPlan:
            return make_plan(settings, machine, replace(invocation, run_dir=run_dir))

        alone = bool(process.candidates)
        tuned = plan_tuning(make, wanted.settings, tuning, needs_levers=not alone)
        return replace(tuned, plan=_keeping(tuned.plan))

    scratch = "" if request.keep_writes else str(scratch_folder(invocation.run_id))
    process = _process_settings(wanted.settings, machine, invocation, apart=bool(scratch))
    tuning = Tuning(budget_s - _settings_s(budget_s, process), scratch, ())
    first = plan(invocation.run_dir, tuning)
    first = replace(first, left=first.left | dict(process.left))
    if request.dry_run:
        print_plan(first.plan, invocation, explain=False, as_json=request.json)
        return 0
    quiet = wanted.settings.quiet.value
    until_s = time.monotonic() + budget_s
    of = holds_for(first.plan, machine, invocation)
    if not quiet:
        sys.stderr.write(_announced(first, process, budget_s))
    ended = _tune(first, plan, invocation, quiet=quiet) if first.levers else _without_levers(first)
    candidates, of_no_use = without_use(process.candidates, ended.report)
    process = replace(process, candidates=candidates)
    first = replace(first, left=first.left | of_no_use)
    if _has_settings(ended, process):
        kept = settings_with_kept(wanted.settings, ended.report, first.plan)
        ground = Ground(kept, machine, invocation, until_s - END_S, quiet)
        ended = _compare_settings(ended, ground, process)
    code = _tell(ended, first, quiet=quiet, json=request.json)
    if ended.report.says_something and code == 0:
        assert of is not None, "no other run can be tuned"
        _save(ended.report, first.plan, of, machine, invocation.cwd)
    return code


def _process_settings(
    settings: Settings, machine: Machine, invocation: Invocation, *, apart: bool
) -> ProcessSettings:
    """Return the settings of the process that are compared at the end."""
    environ = invocation.environ
    return plan_process_settings(
        lambda it: make_plan(it, machine, invocation),
        settings,
        environ,
        machine,
        physical_cores=physical_cores(Host(environ)),
        glibc=platform.libc_ver()[0] == "glibc",
        apart=apart,
    )


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
    """Ends a run that hasn't ended itself when its budget was over, or that can't be compared.

    Args:
        budget_s: Its budget.
        children: Whether only processes that the script starts train.

    Attributes:
        over: Whether it has.
    """

    def __init__(self, budget_s: float, children: Children) -> None:
        self.over = False
        self._children = children
        self._until_s = time.monotonic() + budget_s + OVERTIME_S

    def heard(self, signum: int) -> None:
        """Do nothing: the run ends by itself."""

    def tick(self) -> None:
        """End the run once, as a signal from outside would."""
        late = time.monotonic() > self._until_s
        if not self.over and (late or self._children.train_alone()):
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


@dataclass(frozen=True, slots=True)
class _Ended:
    """How the starts of the script ended.

    Attributes:
        report: The result.
        receipt: Of the last start.
        by_us: Whether fasttrain ended it, because the budget was over, or nothing can be compared.
        said: The end of the last start's output.
    """

    report: TuningReport
    receipt: Receipt
    by_us: bool
    said: bytes


def _tune(
    first: TuningPlan,
    plan: Callable[[str, Tuning], TuningPlan],
    invocation: Invocation,
    *,
    quiet: bool,
) -> _Ended:
    """Start the script, and again as long as it ends before everything is compared."""
    tuning = first.plan.tuning
    assert tuning is not None
    until_s = time.monotonic() + tuning.budget_s
    ended, progress, in_vain = _start(first, invocation, quiet=quiet), (0, 0), 0
    earlier = run_dir = first.plan.run_dir
    for number in count(2):
        state = _read_state(run_dir)
        left_s = until_s - time.monotonic()
        in_vain = 0 if state.progress > progress else in_vain + 1
        if not _goes_on(ended, tuning) or in_vain == MOST_IN_VAIN:
            break
        if left_s < LEAST_S:
            ended = replace(ended, report=replace(ended.report, end="budget"))
            break
        if not quiet:
            steps = f"{ended.report.steps:,} steps"
            sys.stderr.write(f"fasttrain: the script has ended after {steps}: started again\n")
        if not in_vain:
            progress, earlier = state.progress, run_dir
        run_dir = str(Path(first.plan.run_dir, f"start-{number}"))
        next_tuning = Tuning(left_s, tuning.scratch, (), seed=number, earlier=earlier)
        try:
            later = _start(plan(run_dir, next_tuning), invocation, quiet=quiet)
        except KeyboardInterrupt:  # between two starts
            code = int(ExitCode.INTERRUPTED)
            interrupted = replace(ended.receipt, exit_code=code, interrupted=True)
            ended = replace(ended, receipt=interrupted)
            break
        ended = replace(later, report=_latest(ended.report, later.report))
    ended = replace(ended, report=with_all_levers(ended.report, first))
    write_private(Path(first.plan.run_dir, TUNING_FILE), dumps(ended.report), durable=False)
    return ended


def with_all_levers(report: TuningReport, tuned: TuningPlan) -> TuningReport:
    """Return a report with a line for each lever, also where it ended before the turn of one."""
    known = {name: one for one in report.compared for name in one.levers}
    if not (known or report.comparing):  # not even plain steps had settled
        return report

    def missing(name: str) -> Compared:
        asked = LEVERS[name].mode(getattr(tuned.plan.levers, name).value)
        reason = NOT_READY if name in report.comparing else "its turn didn't come"
        nothing = Ratio(0.0, 1.0, UNBOUNDED)
        return Compared((name,), asked, "undecided", nothing, reason=reason)

    compared = tuple(known.get(name) or missing(name) for name in tuned.levers)
    return replace(report, compared=compared)


def _latest(before: TuningReport, later: TuningReport) -> TuningReport:
    """Return what is known after another start.

    One that was ended before it came to train has no report. Any other has all that is known, also
    if its steps are fewer in all: those of a start in which nothing was timed don't count.
    """
    return later if later.starts > 1 else before


def _announced(first: TuningPlan, process: ProcessSettings, budget_s: float) -> str:
    tuning = first.plan.tuning
    assert tuning is not None
    writes = "thrown away" if tuning.scratch else "kept"
    names = list(dict.fromkeys(one.setting for one in process.candidates))
    parts = (*first.levers, *names)
    return (
        f"fasttrain: comparing {', '.join(parts)} for at most {budget_s:.0f} s;"
        f" what the script writes is {writes}\n"
    )


def _without_levers(first: TuningPlan) -> _Ended:
    """Begin the run directory where there are only settings of the process to compare."""
    plan, report = first.plan, TuningReport("decided", 0, 0.0, starts=0)
    with claim(plan.run_dir) as claimed:
        begin(claimed, TUNING_FILE, dumps(report))
    receipt = Receipt(plan.run_id, plan.run_dir, command="", exit_code=0, wall_s=0.0)
    return _Ended(report, receipt, by_us=False, said=b"")


def _settings_s(budget_s: float, process: ProcessSettings) -> float:
    """Return the part of the budget that is kept for settings of the process."""
    if not process.candidates or budget_s < 3 * LEAST_SETTINGS_S:
        return 0.0  # they have what the levers leave
    share = min(SETTINGS_SHARE, VALUE_SHARE * len(process.candidates))
    return max(LEAST_SETTINGS_S, share * budget_s)


def _has_settings(ended: _Ended, process: ProcessSettings) -> bool:
    """Whether there are settings to compare, and the script hasn't failed with levers."""
    well = ended.receipt.exit_code == 0 or ended.by_us
    trains = ended.report.steps > 0 or not ended.report.starts
    return bool(process.candidates) and well and trains


def _compare_settings(ended: _Ended, ground: Ground, process: ProcessSettings) -> _Ended:
    """Compare settings of the process on top of the levers that are kept."""
    search = SettingsSearch(ground, process.candidates, ended.report)
    try:
        search.run()
    except KeyboardInterrupt:  # between two starts
        search.signum = int(signal.SIGINT)
    receipt = ended.receipt
    if search.signum:
        interrupted = search.signum == signal.SIGINT
        receipt = replace(receipt, exit_code=128 + search.signum, interrupted=interrupted)
    by_us = ended.by_us and not search.signum
    return replace(ended, report=search.report, receipt=receipt, by_us=by_us)


def _goes_on(ended: _Ended, tuning: Tuning) -> bool:
    """Whether the script ended by itself before everything was compared, and left no files."""
    early = ended.report.end in ("script", "running")  # the latter by os._exit
    trains = ended.report.steps > 0
    return early and trains and ended.receipt.exit_code == 0 and bool(tuning.scratch)


def _start(tuned: TuningPlan, invocation: Invocation, *, quiet: bool) -> _Ended:
    from fasttrain.launch.node_run import Observers
    from fasttrain.launch.process.stop import heard_again
    from fasttrain.launch.start import start

    plan = tuned.plan
    assert plan.tuning is not None
    budget = _Budget(plan.tuning.budget_s, Children(Path(plan.run_dir)))
    watches = (budget,) if quiet else (budget, _Progress(Path(plan.run_dir)))
    around = partial(look_around, Host(invocation.environ))
    display = Silent()
    observers = Observers(display, around, watches=watches)
    masked = mask_plan(plan, invocation.environ)
    with heard_again(), scratch_made(plan.tuning.scratch):  # the budget ends it by a signal
        receipt = start(plan, masked, invocation.environ, observers)
    report = _read(Path(plan.run_dir))
    if budget.over and report.end == "running":  # a step, or a compilation, took longer
        report = replace(report, end="budget")
    if trains_in_children(Path(plan.run_dir)):
        report = replace(report, end="children")
    return _Ended(report, receipt, budget.over, display.last)


def _tell(ended: _Ended, tuned: TuningPlan, *, quiet: bool, json: bool) -> int:
    """Print the result, and return the exit code."""
    from fasttrain.cli.cards.crash import print_crash
    from fasttrain.cli.cards.tuning import print_tuning

    report, receipt = ended.report, ended.receipt
    failed = 0 if ended.by_us else receipt.exit_code
    if receipt.crash and not ended.by_us:
        told = replace(receipt.crash, shown=False)  # nothing of its output was
        print_crash(told, receipt.run_dir, brief=quiet)
    elif receipt.exit_code == ExitCode.UNAVAILABLE:  # the agent started no rank that could fail
        sys.stderr.write(ended.said.decode(errors="replace"))
    if json:
        sys.stdout.write(envelope("tuning", report) + "\n")
    else:
        print_tuning(report, tuned, tuned.plan.run_dir, failed)
    if failed:
        return ExitCode.INTERRUPTED if receipt.interrupted else failed
    return 0 if report.says_something else int(ExitCode.UNAVAILABLE)


def _save(report: TuningReport, plan: LaunchPlan, of: TunedFor, machine: Machine, cwd: str) -> None:
    try:
        save(report, plan, of, machine, cwd)
    except OSError as error:
        sys.stderr.write(f"fasttrain: warning: the result isn't kept: {error.strerror}\n")


def _read(run_dir: Path) -> TuningReport:
    try:
        return load(TuningReport, run_dir / TUNING_FILE)
    except (OSError, CodecError):  # the script never imported torch, or has written no report yet
        return TuningReport("running", 0, 0.0)


def _read_state(run_dir: str) -> TuningState:
    try:
        return load(TuningState, Path(run_dir, TUNING_STATE_FILE))
    except (OSError, CodecError):  # nothing was compared
        return TuningState(TuningReport("running", 0, 0.0))
