"""Keeps results of ``fasttrain tune`` in the folder of runs, for ``fasttrain run`` to find."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import astuple, replace
from datetime import date, datetime
from hashlib import sha256
from pathlib import Path

from fasttrain.cli import history
from fasttrain.config.options import BY_NAME, parse_setting
from fasttrain.files import load, write_private
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.decision import Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS
from fasttrain.model.machine import Machine
from fasttrain.model.places import RUNS_FOLDER
from fasttrain.model.plan import Invocation, LaunchPlan
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import (
    TUNED_FILE,
    UNBOUNDED,
    Tuned,
    TunedFor,
    TunedResults,
    TuningReport,
)
from fasttrain.planning.explain import mask_plan
from fasttrain.planning.plan import make_plan
from fasttrain.planning.process_settings import is_valid, tuned_variables, use_result
from fasttrain.planning.tuning import find_tuned, on_one_node, tuned_for, tuned_options

MOST_RESULTS = 100  # the latest ones of a folder


def plan_run(settings: Settings, machine: Machine, invocation: Invocation) -> LaunchPlan:
    """Return the plan of a run, with what was tuned for it in the place of defaults.

    Raises:
        FasttrainError: If the request contradicts itself or the machine.
    """
    plan = make_plan(settings, machine, invocation)
    of = holds_for(plan, machine, invocation)
    if of is None:
        return plan
    results, problem = read(invocation.cwd)
    found, stale = find_tuned(results, of)
    unused: tuple[str, ...] = ()
    if found is not None:
        plan, unused = use_result(found, settings, machine, invocation, plan)
        of = holds_for(plan, machine, invocation) or of  # it may be of several ranks now
    told = tuple(f"{text}." for text in (problem, stale, *unused) if text)
    auto = plan.levers.compile.value.asked == "auto"
    earlier = history.find(history.read(invocation.cwd), of, plan) if auto else None
    return replace(plan, hints=(*plan.hints, *told), earlier=earlier)


def holds_for(plan: LaunchPlan, machine: Machine, invocation: Invocation) -> TunedFor | None:
    """Return what a result of this run would hold for; None if none is kept of such a run."""
    if not on_one_node(plan) or plan.target.kind == "command":
        return None
    source = ""
    if plan.target.kind == "script":
        with suppress(OSError):  # it is opened again to be run, which tells why it can't be
            source = sha256(Path(plan.cwd, plan.target.name).read_bytes()).hexdigest()[:16]
    return tuned_for(mask_plan(plan, invocation.environ), machine, source)


def results_path(cwd: str) -> Path:
    """Return where the results of a working directory are kept."""
    return Path(cwd, RUNS_FOLDER, TUNED_FILE)


def read(cwd: str) -> tuple[TunedResults, str]:
    """Return the results in a working directory, and why some can't be used; empty if all can."""
    path = results_path(cwd)
    try:
        found = load(TunedResults, path)
    except FileNotFoundError:
        return TunedResults(), ""
    except (OSError, CodecError) as error:
        return TunedResults(), f"what was tuned can't be read: {path}: {error}"
    valid = tuple(one for one in found.results if _is_valid(one))
    problem = "" if valid == found.results else f"{path} has results that tune doesn't write"
    return TunedResults(valid), problem


def save(
    report: TuningReport, plan: LaunchPlan, of: TunedFor, machine: Machine, cwd: str
) -> Path | None:
    """Keep a result for later runs, in the place of an earlier one of the same; return where.

    Args:
        report: The result.
        plan: The plan of the run that tuned.
        of: What it holds for, as of before the run: the script may have been edited meanwhile.
        machine: The machine.
        cwd: The working directory.
    """
    options = tuned_options(report, plan)
    variables = tuned_variables(report, machine.cpu.cores)
    if not options and not variables:
        return None
    last = report.together or next((one for one in report.compared if one.kept), None)
    ratio = last.ratio if last is not None and last.ratio.high < UNBOUNDED else None
    now = Tuned(of, f"{datetime.now():%Y-%m-%d}", options, ratio, variables)
    others = [one for one in read(cwd)[0].results if one.of != of]
    path = results_path(cwd)
    path.parent.mkdir(exist_ok=True)
    write_private(path, dumps(TunedResults((*others, now)[-MOST_RESULTS:])))
    return path


def _is_valid(tuned: Tuned) -> bool:
    source = Source(SourceKind.TUNED, TUNED_FILE)
    low, middle, high = astuple(tuned.ratio) if tuned.ratio is not None else (1.0, 1.0, 1.0)
    if not 0 <= low <= middle <= high < UNBOUNDED:
        return False
    try:
        date.fromisoformat(tuned.date)
        for name, value in tuned.options.items():
            parse_setting(BY_NAME[name], value, source)
    except (FasttrainError, KeyError, ValueError):
        return False
    return tuned.options.keys() <= LEVERS.keys() and all(map(is_valid, tuned.variables))
