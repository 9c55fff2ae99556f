"""The result of ``fasttrain tune``, printed for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fasttrain.cli.cards.receipt import near, seconds
from fasttrain.cli.console import stdout_console
from fasttrain.model.decision import SourceKind
from fasttrain.model.levers import LEVERS
from fasttrain.model.tuning import UNBOUNDED, Compared, Ratio, TuningReport
from fasttrain.planning.tuning import TuningPlan, option_word, tuned_options

STYLES = {
    "faster": "green",
    "slower": "dim",
    "same": "dim",
    "no effect": "dim",
    "undecided": "yellow",
    "wrong": "bold red",
}
IN_CHILDREN = (
    "the script trains in processes that it starts, and only steps of its own process are compared"
)
_ENDS = {
    "decided": "",
    "budget": "the budget is spent",
    "script": "the script ended before everything was compared",
    "children": IN_CHILDREN,
    "running": "it was ended before everything was compared",
}
BY_PROCESSOR = "{verdict} by the processor's time; wall clock, whose ratio this is, can't tell yet"
_LONGER = ": a longer --budget compares more"


def print_tuning(report: TuningReport, tuned: TuningPlan, run_dir: str, exit_code: int = 0) -> None:
    """Print a result to stdout.

    Args:
        report: The result.
        tuned: What was planned.
        run_dir: Where it is kept.
        exit_code: Of the script; later runs don't use the result of one that failed.
    """
    console = stdout_console()
    starts = f", {report.starts} starts of the script" if report.starts > 1 else ""
    head = f"fasttrain: compared for {seconds(report.wall_s)}, {report.steps:,} steps{starts}"
    console.print(Text(head, style="bold"), soft_wrap=True)
    if report.compared or report.settings:
        for table in (_times(report), _costs(report)):
            if len(table.columns) > 1:  # else it has names only
                console.print(Padding(table, (0, 0, 0, 2)))
    for line in _footer(report, tuned, run_dir, exit_code):
        console.print(Text(f"  {line}"), soft_wrap=True)


def _rows(report: TuningReport) -> Iterator[tuple[str, Compared]]:
    for one in report.compared:
        yield f"{one.levers[0]} {one.asked}", one
    if report.together is not None:
        yield "all that is kept", report.together
    for one in report.settings:
        against = f" against {one.against}" if one.against else ""
        yield f"{one.levers[0]} {one.asked}{against}", one


def _times(report: TuningReport) -> Table:
    titles = ("setting", "verdict", "ratio (95 %)", "step", "without", "epoch")
    rows: list[tuple[str | Text, ...]] = [
        (
            *(name, Text(one.verdict, style=STYLES[one.verdict]), _ratio(one.ratio)),
            *(_seconds(time_s) for time_s in (one.step_s, one.plain_step_s)),
            _seconds(one.step_s * report.epoch_steps),
        )
        for name, one in _rows(report)
    ]
    return _table(titles, rows)


def _costs(report: TuningReport) -> Table:
    titles = ("setting", "results", "first use", "pays after", "memory", "without")
    rows = [
        (
            *(name, _parity(one), _seconds(one.first_use_s)),
            f"{one.pays_after:,} steps" if one.first_use_s and one.pays_after else "",
            *(_gigabytes(peak) for peak in (one.peak_bytes, one.plain_peak_bytes)),
        )
        for name, one in _rows(report)
    ]
    return _table(titles, rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Return a table without the columns that are empty, which would take room from the others."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    filled = [at for at in range(len(titles)) if any(row[at] for row in rows)]
    for at in filled:
        table.add_column(titles[at], no_wrap=at > 0, overflow="fold")
    for row in rows:
        table.add_row(*(row[at] for at in filled))
    return table


def _seconds(value: float) -> str:
    return seconds(value) if value else ""


def _gigabytes(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value else ""


def _parity(one: Compared) -> str:
    if one.parity is None:
        return ""
    return {True: "right", False: "wrong", None: "unknown"}[one.parity.right]


def _ratio(ratio: Ratio) -> str:
    if ratio.high >= UNBOUNDED:
        return ""
    return f"x {ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _footer(report: TuningReport, tuned: TuningPlan, run_dir: str, exit_code: int) -> Iterator[str]:
    if report.noise is not None and report.noise.ratio.high < UNBOUNDED:
        yield f"plain against plain: {_ratio(report.noise.ratio)}, {report.noise.pairs} pairs"
    for name, reason in tuned.left.items():
        yield f"not compared: {name}: {reason}"
    if not report.says_something and not report.settings:
        yield f"nothing was compared: {_why_nothing(report, exit_code)}"
    elif note := _ENDS[report.end]:
        names = " and ".join(report.comparing)
        comparing = f", while it compared {names}" if names else ""
        yield f"{note}{comparing}{_LONGER if report.end == 'budget' else ''}"
    for name, one in _rows(report):
        if one.reason:
            yield f"{name}: {one.reason}"
        if one.ratio.leaves_open(one.verdict):
            yield f"{name}: {BY_PROCESSOR.format(verdict=one.verdict)}"
    options = tuned_options(report, tuned.plan)
    variables = [one.variable for one in report.kept_settings.values()]
    if options or variables:
        used = f"don't use this, for it ended with exit code {exit_code}; by hand"
        used = used if exit_code else "of it use this; in full"
        yield f"later runs {used}: {_command(options, variables, tuned)}"
    elif report.says_something or report.settings:
        yield "nothing faster was found: later runs have the defaults"
    yield f"kept in {near(run_dir)}"


def _why_nothing(report: TuningReport, exit_code: int) -> str:
    if report.end == "budget":
        steps = f"{report.steps:,} steps" if report.steps else "what comes before the first step"
        first = f", and {report.comparing[0]} was not ready by then" if report.comparing else ""
        return f"{steps} took all of the budget{first}{_LONGER}"
    if report.end == "children":
        return IN_CHILDREN
    if not report.steps:
        return "no optimizer step was seen"
    if report.end == "running":
        return f"it was ended after {report.steps:,} steps"
    ended = f"ended with exit code {exit_code}" if exit_code else "ended"
    return f"the script {ended} after {report.steps:,} steps, before their times had settled"


def _command(options: Mapping[str, str], variables: Sequence[str], tuned: TuningPlan) -> str:
    """Return the command line that trains with these levers and settings."""
    target = tuned.plan.target
    script = ["-m", target.name] if target.kind == "module" else [target.name]
    options = _typed(tuned) | dict(options)
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    for variable in variables:
        words += variable.split("=", 1) if variable.startswith("--") else ["--env", variable]
    words = [*_ranks(tuned), *words]
    args = ["--", *target.args] if target.args else []
    return shlex.join(["fasttrain", "run", *script, *words, *args])


def _typed(tuned: TuningPlan) -> dict[str, str]:
    """Return the levers that flags have decided, with which the others were compared."""
    decisions = {name: getattr(tuned.plan.levers, name) for name in LEVERS if name != "strategy"}
    return {
        name: option_word(LEVERS[name].mode(decision.value))
        for name, decision in decisions.items()
        if decision.source.kind is SourceKind.FLAG and name in tuned.left
    }


def _ranks(tuned: TuningPlan) -> list[str]:
    """Return the options by which the same processes make one run."""
    plan = tuned.plan
    count, strategy = plan.processes.value.nproc_per_node, plan.levers.strategy
    if count == 1:
        return []
    words = ["--nproc-per-node", str(count)]
    if strategy.source.explicit:
        words += ["--strategy", strategy.value.mode]
    return [*words, "--batch", "per-rank"] if strategy.value.batch == "per-rank" else words
