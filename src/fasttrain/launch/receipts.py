"""Gathers the reports of the ranks into the receipt of the run."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fasttrain.files import load, write_private
from fasttrain.launch.hang.verdict import rank_list
from fasttrain.launch.node_run import Ended
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.hang import HANG_FILE, Hang
from fasttrain.model.levers import LEVERS
from fasttrain.model.outcome import (
    PREEMPTED,
    RECEIPT_FILE,
    Outcome,
    RankReport,
    Receipt,
    Site,
    State,
    StepStats,
)
from fasttrain.model.places import RUNS_FOLDER, SNAPSHOTS_FOLDER
from fasttrain.model.plan import LaunchPlan

# Merges the report of a worker with those of the processes that its script started.


# The most telling comes first: a child that trained says more than a parent that only waited.
_TELLING = (
    State.APPLIED, State.FAILED, State.CEDED, State.SKIPPED, State.ARMED, State.OFF,
)  # fmt: skip

# Counts that are a level and no total: the lowest one is reported.
_LEVELS = {"scale"}


def merged(worker: RankReport, children: Iterable[RankReport]) -> RankReport:
    """Return the worker's report with what its children did.

    Speed is that of the process with the most steps, peak memory the highest of all.
    """
    reports = (worker, *children)
    if len(reports) == 1:
        return worker
    by_lever: defaultdict[str, list[Outcome]] = defaultdict(list)
    for report in reports:
        for outcome in report.outcomes:
            by_lever[outcome.lever].append(outcome)
    busiest = max(reports, key=lambda report: report.stats.steps)
    peak = max(report.stats.peak_memory_bytes for report in reports)
    return replace(
        worker,
        device=worker.device or busiest.device,
        outcomes=tuple(_together(outcomes) for outcomes in by_lever.values()),
        warnings=tuple(dict.fromkeys(w for report in reports for w in report.warnings)),
        stats=replace(busiest.stats, peak_memory_bytes=peak, wall_s=worker.stats.wall_s),
    )


def _together(outcomes: list[Outcome]) -> Outcome:
    leading = min(outcomes, key=lambda outcome: _TELLING.index(outcome.state))
    counts: Counter[str] = Counter()
    sites: Counter[tuple[str, str]] = Counter()
    notes: dict[str, None] = {}
    missed = tuple(dict.fromkeys(text for outcome in outcomes for text in outcome.missed))
    for outcome in outcomes:
        counts.update(outcome.counts)
    for name in counts.keys() & _LEVELS:
        counts[name] = min(o.counts[name] for o in outcomes if name in o.counts)
    for outcome in outcomes:
        sites.update({(site.what, site.where): site.count for site in outcome.sites})
        notes.update(dict.fromkeys(outcome.notes))
    applied = sum(outcome.state is State.APPLIED for outcome in outcomes)
    if leading.state is State.APPLIED and outcomes[0].state is not State.APPLIED:
        notes[in_children(applied)] = None
    return replace(
        leading,
        sites=tuple(Site(what, where, count) for (what, where), count in sites.items()),
        counts=dict(counts),
        notes=tuple(notes),
        missed=missed,
    )


def in_children(count: int) -> str:
    """Return the note on a lever that took effect in processes of the script's alone."""
    return f"in {count} processes that the script started"


_CHILD = ".child-"  # in the name of a report
T = TypeVar("T", Receipt, Hang)

NO_TORCH = (
    "no process that fasttrain follows imported torch, so no lever acted: another program that the"
    " script starts, or puts in its own place (os.execv), has none; start that by fasttrain run"
)


def gather(plan: LaunchPlan, ended: Ended, run_dirs: Iterable[Path] = ()) -> Receipt:
    """Read every rank's report and write receipt.json.

    Args:
        plan: The plan with its secrets masked.
        ended: How it ended, as the launcher saw it.
        run_dirs: Where the reports lie; in the run directory unless several nodes have their own.
    """
    run_dirs = tuple(run_dirs) or (Path(plan.run_dir),)
    reports, problems = _read_reports(run_dirs)
    reports = tuple(_with_steps(report, ended.steps.get(report.rank, 0)) for report in reports)
    # A script that failed may not have reached its model; only its own error is worth reporting.
    missed = tuple(unmet(reports, strict=plan.strict)) if ended.exit_code == 0 else ()
    hints = _ways_on(plan, ended.exit_code)
    if ended.exit_code == 0 and not (reports or problems) and plan.target.kind != "command":
        missed, hints = tuple(_unmet_without_torch(plan)), _why_without_torch(plan)
    receipt = Receipt(
        run_id=plan.run_id,
        run_dir=str(run_dirs[0]),
        command=shlex.join((plan.target.name, *plan.target.args)),
        exit_code=int(ended.exit_code),
        wall_s=ended.wall_s,
        ranks=reports,
        unmet=missed,
        warnings=(*plan.warnings, *ended.warnings, *_warnings_of_ranks(reports), *problems),
        hints=(*plan.hints, *hints),
        crash=ended.crash,
        attempts=ended.attempts,
        interrupted=ended.interrupted,
    )
    return _kept(receipt, run_dirs[0] / RECEIPT_FILE)


def _kept(receipt: Receipt, path: Path) -> Receipt:
    """Write the receipt; if that fails, add a warning to the one that is shown."""
    try:
        write_private(path, dumps(receipt))
    except OSError as error:
        problem = f"{path.name} can't be written, and this is all that is left: {error.strerror}"
        return replace(receipt, warnings=(*receipt.warnings, problem))
    return receipt


def _warnings_of_ranks(reports: tuple[RankReport, ...]) -> list[str]:
    """Return the ranks' own warnings, each once with the ranks that have it."""
    return _once((report.rank, warning) for report in reports for warning in report.warnings)


def _once(sentences: Iterable[tuple[int, str]]) -> list[str]:
    """Return each sentence once, after the ranks for which it holds."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, sentence in sentences:
        ranks[sentence].append(rank)
    return [f"{rank_list(having)}: {sentence}" for sentence, having in ranks.items()]


def read_receipt(run_dir: Path) -> Receipt:
    """Read the receipt of an earlier run.

    Raises:
        FasttrainError: There is none, or it can't be read.
    """
    return _read(Receipt, run_dir / RECEIPT_FILE)


def read_hang(run_dir: Path) -> Hang | None:
    """Read the last hang of an earlier run; None without one.

    Raises:
        FasttrainError: It can't be read.
    """
    path = run_dir / HANG_FILE
    return _read(Hang, path) if path.exists() else None


def _read(kind: type[T], path: Path) -> T:
    try:
        return load(kind, path)
    except (OSError, CodecError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise FasttrainError(
            f"{path} can't be read",
            why=why,
            fix=f"name the directory of a run that has ended, such as one in {RUNS_FOLDER}/",
            slug="receipt",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error


def _read_reports(run_dirs: Iterable[Path]) -> tuple[tuple[RankReport, ...], list[str]]:
    workers: list[RankReport] = []
    children: defaultdict[int, list[RankReport]] = defaultdict(list)
    problems = []
    for path in (path for run_dir in run_dirs for path in sorted(run_dir.glob("rank-*.json"))):
        try:
            report = load(RankReport, path)
        except (OSError, CodecError) as error:
            problems.append(f"{path.name} can't be read: {error}")
            continue
        (children[report.rank] if _is_childs(path) else workers).append(report)
    known = {worker.rank for worker in workers}
    workers += [_torchless(of[0]) for rank, of in children.items() if rank not in known]
    reports = [merged(worker, children[worker.rank]) for worker in workers]
    return tuple(sorted(reports, key=lambda report: report.rank)), problems


def _is_childs(path: Path) -> bool:
    """True if a report is of a process that the script started."""
    return _CHILD in path.name


def _torchless(child: RankReport) -> RankReport:
    """Return the report of a worker that left torch to its children, such as this one."""
    outcomes = tuple(Outcome(o.lever, o.asked, State.OFF) for o in child.outcomes)
    return RankReport(child.rank, "", child.torch_version, outcomes, StepStats(), finished=True)


def _with_steps(report: RankReport, steps: int) -> RankReport:
    """Return the report of a rank that was killed, with the steps made after it was written."""
    if report.finished or steps <= report.stats.steps:
        return report
    known = replace(report.stats, steps=steps, reported_until=report.stats.steps)
    return replace(report, stats=known)


def trains_in_children(run_dir: Path) -> bool:
    """True if processes that the script started have made steps so far, and no rank itself has."""
    if not any(run_dir.glob(f"rank-*{_CHILD}*.json")):
        return False
    steps = {True: 0, False: 0}
    for path in run_dir.glob("rank-*.json"):
        with suppress(OSError, CodecError):
            stats = load(RankReport, path).stats
            # Workers of a DataLoader may differentiate, to augment; they train nothing.
            steps[_is_childs(path)] += 0 if _is_childs(path) and stats.are_passes else stats.steps
    return steps[True] > 0 and not steps[False]


def was_preempted(run_dir: Path) -> bool:
    """True if the ranks that report in a directory ended after a snapshot, to be resumed."""
    reports, _ = _read_reports((run_dir,))
    return any(outcome.counts.get(PREEMPTED) for r in reports for outcome in r.outcomes)


def took_the_signal(run_dir: Path) -> bool:
    """True if the ranks that report in a directory didn't leave the signal to the script.

    False if none reports, such as those of a script without torch: nothing is known of it then.
    """
    reports, _ = _read_reports((run_dir,))
    outcomes = [o for r in reports for o in r.outcomes if o.lever == "preempt"]
    return bool(outcomes) and all(outcome.state is not State.CEDED for outcome in outcomes)


def _ways_on(plan: LaunchPlan, exit_code: int) -> tuple[str, ...]:
    if exit_code != ExitCode.PREEMPTED:
        return ()
    directory = shlex.quote(plan.run_dir)
    alone = plan.processes.value.backend == "direct"  # or rank 0 may have them elsewhere
    if alone and not any(Path(plan.run_dir, SNAPSHOTS_FOLDER).glob("step-*")):
        return ("no snapshot was taken yet: the same command starts over, in a new --run-dir",)
    return (f"the same command with --resume {directory} goes on from the snapshot",)


def _why_without_torch(plan: LaunchPlan) -> tuple[str, ...]:
    """Return why no lever acted in a run without reports; empty if none is on."""
    return (NO_TORCH,) if plan.levers.on() else ()


def _unmet_without_torch(plan: LaunchPlan) -> list[str]:
    """Return one sentence for each lever that the user named, or that is on where it is strict."""
    return [
        f"{name} {word} was not applied: torch was not imported"
        for name, word in plan.levers.on().items()
        if getattr(plan.levers, name).source.explicit
        or (plan.strict and word not in LEVERS[name].undecided)
    ]


def unmet(reports: tuple[RankReport, ...], *, strict: bool = False) -> list[str]:
    """Return one sentence for each lever that was armed or named by the user, but not applied.

    Where nothing was trained, as by ``train.py --help``, a default that was only armed is left out
    unless `strict`.
    """
    idle = all(report.idle for report in reports) and not strict
    return _once(
        (report.rank, f"{outcome.lever} {outcome.asked} was not applied{what}")
        for report in reports
        for outcome in report.outcomes
        for what in _unmet_parts(outcome, idle=idle)
    )


def _is_unmet(outcome: Outcome, *, idle: bool) -> bool:
    if outcome.state is State.ARMED and not outcome.explicit:
        return not idle
    if outcome.state in (State.ARMED, State.FAILED):
        return True
    return outcome.explicit and outcome.state is State.SKIPPED


def _unmet_parts(outcome: Outcome, *, idle: bool) -> list[str]:
    if _is_unmet(outcome, idle=idle):
        return [f": {outcome.reason}"]
    # A sharded model whose calls aren't split is one of them.
    return [f" in full: {missed}" for missed in outcome.missed] if outcome.explicit else []
