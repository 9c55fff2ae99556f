"""Keeps what runs have shown of their length and speed in the folder of runs, for later ones."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from fasttrain.files import load, write_private
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.compile_auto import (
    COMPILE_AUTO_FILE,
    HISTORY_FILE,
    Earlier,
    History,
    KnownRun,
    Switched,
)
from fasttrain.model.errors import printable
from fasttrain.model.levers import LEVERS
from fasttrain.model.outcome import Receipt, State
from fasttrain.model.places import RUNS_FOLDER
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.tuning import TunedFor

MOST_RUNS = 100  # the latest ones of a folder


def read(cwd: str) -> History:
    """Return the history of a working directory; an empty one if it can't be read."""
    try:
        return load(History, Path(cwd, RUNS_FOLDER, HISTORY_FILE))
    except (OSError, CodecError):  # it is a help, and nothing that a user wrote
        return History()


def find(history: History, of: TunedFor, plan: LaunchPlan) -> Earlier | None:
    """Return what is known about a run; None if nothing is.

    Under other levers only the number of its steps is.
    """
    known = next((run.known for run in reversed(history.runs) if run.of == of), None)
    if known is not None:  # both are shown, and the file may be anybody's
        known = replace(known, date=printable(known.date), dropped=printable(known.dropped))
    if known is None or known.levers == _others(plan):
        return known
    return Earlier(known.date, known.steps, levers=_others(plan))


def _others(plan: LaunchPlan) -> tuple[str, ...]:
    """Return the values of all levers but compile, and what would be compiled."""
    decided = {name: getattr(plan.levers, name).value for name in LEVERS}
    words = [LEVERS[name].words(value) for name, value in decided.items() if name != "compile"]
    return (*words, decided["compile"].scope)


def remember(receipt: Receipt, plan: LaunchPlan, of: TunedFor, cwd: str) -> None:
    """Keep what a run has shown, where its folder of runs is; else nothing.

    Args:
        receipt: The run.
        plan: Its plan.
        of: What it holds for.
        cwd: Its working directory.
    """
    folder = Path(cwd, RUNS_FOLDER)
    if not receipt.ranks or not receipt.ranks[0].stats.steps or not folder.is_dir():
        return
    history = read(cwd)
    before = find(history, of, plan) or Earlier("")
    known = learned(before, receipt, plan, _switched(plan))
    others = [run for run in history.runs if run.of != of]
    runs = (*others, KnownRun(of, known))[-MOST_RUNS:]
    write_private(folder / HISTORY_FILE, dumps(History(runs)), durable=False)


def learned(
    before: Earlier, receipt: Receipt, plan: LaunchPlan, switched: Switched | None
) -> Earlier:
    """Return what is known after a run.

    Args:
        before: What was known before it.
        receipt: The run.
        plan: Its plan.
        switched: What it has found under ``--compile auto``; None for another run.
    """
    stats = receipt.ranks[0].stats
    known = replace(before, date=f"{datetime.now():%Y-%m-%d}", levers=_others(plan))
    cut = plan.max_steps is not None and stats.steps >= plan.max_steps
    if receipt.exit_code == 0 and not cut:
        known = replace(known, steps=stats.steps)
    compiled = plan.levers.compile.value
    if compiled.asked == "off":
        return replace(known, plain_step_s=stats.median_step_s)
    if compiled.asked == "default":
        states = {one.lever: one.state for one in receipt.ranks[0].outcomes}
        applied = states.get("compile") is State.APPLIED
        if not applied:
            return known
        return replace(known, compiled_step_s=stats.median_step_s, compile_s=stats.compile_s)
    if switched is None or switched.phase not in ("kept", "dropped"):
        return replace(known, plain_step_s=stats.median_step_s or known.plain_step_s)
    # One of which too little is known may be tried again, if its times say that it pays.
    sure = switched.phase == "dropped" and not switched.undecided
    return replace(
        known,
        plain_step_s=switched.plain_step_s,
        compiled_step_s=switched.compiled_step_s or known.compiled_step_s,
        background_s=switched.background_s,
        slowed_s=switched.slowed_s,
        stall_s=switched.stall_s,
        dropped=switched.reason if sure else "",
        cache=switched.cache,
    )


def _switched(plan: LaunchPlan) -> Switched | None:
    if plan.levers.compile.value.asked != "auto":
        return None
    try:
        return load(Switched, Path(plan.run_dir, COMPILE_AUTO_FILE))
    except (OSError, CodecError):
        return None
