"""The result of ``fasttrain tune``, printed for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fasttrain.cli.cards.receipt import near, seconds
from fasttrain.cli.console import stdout_console
from fasttrain.model.tuning import UNBOUNDED, Compared, Ratio, TuningReport
from fasttrain.planning.tuning import TuningPlan, tuned_options

STYLES = {
    "faster": "green",
    "slower": "dim",
    "same": "dim",
    "no effect": "dim",
    "undecided": "yellow",
    "wrong": "bold red",
}
_ENDS = {
    "decided": "",
    "budget": "the budget is spent: --budget 30m compares longer",
    "script": "the script ended before everything was compared",
    "running": "it was ended before everything was compared",
}


def print_tuning(report: TuningReport, tuned: TuningPlan, run_dir: str) -> None:
    """Print a result to stdout."""
    console = stdout_console()
    head = f"fasttrain: compared for {seconds(report.wall_s)}, {report.steps:,} steps"
    console.print(Text(head, style="bold"), soft_wrap=True)
    if report.compared:
        console.print(Padding(_table(report), (0, 0, 0, 2)))
    for line in _footer(report, tuned, run_dir):
        console.print(Text(f"  {line}"), soft_wrap=True)


def _table(report: TuningReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("setting", "verdict", "step", "without", "ratio (95 %)", "first use", "results"):
        table.add_column(title, no_wrap=True)
    table.add_column("", overflow="fold")
    for one in report.compared:
        _add(table, f"{one.levers[0]} {one.asked}", one)
    if report.together is not None:
        _add(table, "all that is kept", report.together)
    return table


def _add(table: Table, name: str, one: Compared) -> None:
    table.add_row(
        name,
        Text(one.verdict, style=STYLES[one.verdict]),
        seconds(one.step_s) if one.step_s else "",
        seconds(one.plain_step_s) if one.plain_step_s else "",
        _ratio(one.ratio),
        seconds(one.first_use_s) if one.first_use_s else "",
        _parity(one),
        Text("kept" if one.kept else one.reason, style="" if one.kept else "dim"),
    )


def _parity(one: Compared) -> str:
    if one.parity is None:
        return ""
    return {True: "right", False: "wrong", None: "unknown"}[one.parity.right]


def _ratio(ratio: Ratio) -> str:
    if ratio.high >= UNBOUNDED:
        return ""
    return f"x {ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _footer(report: TuningReport, tuned: TuningPlan, run_dir: str) -> Iterator[str]:
    if report.noise is not None and report.noise.ratio.high < UNBOUNDED:
        yield f"plain against plain: {_ratio(report.noise.ratio)}, {report.noise.pairs} pairs"
    for name, reason in tuned.left.items():
        yield f"not compared: {name}: {reason}"
    if not report.says_something:
        yield f"nothing was compared: {_why_nothing(report)}"
    elif note := _ENDS[report.end]:
        names = " and ".join(report.comparing)
        yield f"{note}{f', while it compared {names}' if names else ''}"
    for one in report.compared:
        if one.parity is not None and one.parity.right is not True:
            yield f"{one.levers[0]}: {one.parity.reason}"
    if options := tuned_options(report, tuned.plan):
        yield f"later runs of it use this; in full: {_command(options, tuned)}"
    elif report.says_something:
        yield "nothing was decided: later runs have the defaults"
    yield f"kept in {near(run_dir)}"


def _why_nothing(report: TuningReport) -> str:
    if not report.steps:
        return "no optimizer step was seen"
    if report.end == "budget":
        return f"{report.steps:,} steps took all of the budget"
    return f"the script ended after {report.steps:,} steps, before their times had settled"


def _command(options: Mapping[str, str], tuned: TuningPlan) -> str:
    """Return the command line that trains with these levers."""
    target = tuned.plan.target
    script = ["-m", target.name] if target.kind == "module" else [target.name]
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    args = ["--", *target.args] if target.args else []
    return shlex.join(["fasttrain", "run", *script, *words, *args])
