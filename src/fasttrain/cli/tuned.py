"""Keeps results of ``fasttrain tune`` in the folder of runs, for ``fasttrain run`` to find."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

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
from fasttrain.model.tuning import TUNED_FILE, Tuned, TunedResults, TuningReport
from fasttrain.planning.explain import mask_plan
from fasttrain.planning.plan import make_plan
from fasttrain.planning.tuning import find_tuned, tuned_for, tuned_options, use_tuned

MOST_RESULTS = 100  # the latest ones of a folder


def plan_run(settings: Settings, machine: Machine, invocation: Invocation) -> LaunchPlan:
    """Return the plan of a run, with what was tuned for it in the place of defaults.

    Raises:
        FasttrainError: If the request contradicts itself or the machine.
    """

    def make(settings: Settings) -> LaunchPlan:
        return make_plan(settings, machine, invocation)

    plan = make(settings)
    if plan.processes.value.backend != "direct" or plan.target.kind == "command":
        return plan
    args = mask_plan(plan, invocation.environ).target.args
    found, stale = find_tuned(read(invocation.cwd), tuned_for(machine, invocation, args))
    if found is not None:
        return use_tuned(make, settings, found)
    return replace(plan, hints=(*plan.hints, f"{stale}.")) if stale else plan


def read(cwd: str) -> TunedResults:
    """Return the results in a working directory, without those that name no options of ours."""
    try:
        read = load(TunedResults, Path(cwd, RUNS_FOLDER, TUNED_FILE))
    except (OSError, CodecError):
        return TunedResults()
    return TunedResults(tuple(one for one in read.results if _is_valid(one)))


def save(
    report: TuningReport, plan: LaunchPlan, machine: Machine, invocation: Invocation
) -> Path | None:
    """Keep a result for later runs, in the place of an earlier one of the same; return where.

    Args:
        report: The result.
        plan: The plan of the run that tuned.
        machine: The machine.
        invocation: The circumstances of the call.
    """
    options = tuned_options(report, plan)
    if not options:
        return None
    args = mask_plan(plan, invocation.environ).target.args
    of = tuned_for(machine, invocation, args)
    last = report.together or next((one for one in report.compared if one.kept), None)
    now = Tuned(of, f"{datetime.now():%Y-%m-%d}", options, last.ratio if last else None)
    others = [one for one in read(invocation.cwd).results if one.of != of]
    path = Path(invocation.cwd, RUNS_FOLDER, TUNED_FILE)
    path.parent.mkdir(exist_ok=True)
    write_private(path, dumps(TunedResults((*others, now)[-MOST_RESULTS:])))
    return path


def _is_valid(tuned: Tuned) -> bool:
    source = Source(SourceKind.TUNED, TUNED_FILE)
    try:
        for name, value in tuned.options.items():
            parse_setting(BY_NAME[name], value, source)
    except (FasttrainError, KeyError):
        return False
    return tuned.options.keys() <= LEVERS.keys()
