"""Makes one report of a worker's and of those of the processes that its script started."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from fasttrain.model.outcome import Outcome, RankReport, Site, State

# What tells most comes first: a child that trained says more than a parent that only waited.
_TELLING = (
    State.APPLIED, State.FAILED, State.CEDED, State.SKIPPED, State.ARMED, State.OFF,
)  # fmt: skip

# Where a count is a level and no total, the lowest one is told.
_LEVELS = {"scale"}


def merged(worker: RankReport, children: Iterable[RankReport]) -> RankReport:
    """Give the worker's report with what its children did.

    Speed is that of the process with the most steps, peak memory the highest of them all.
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
        notes[f"in {applied} processes that the script started"] = None
    return replace(
        leading,
        sites=tuple(Site(what, where, count) for (what, where), count in sites.items()),
        counts=dict(counts),
        notes=tuple(notes),
        missed=missed,
    )
