"""What ``fasttrain run --prove`` has found, printed for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fasttrain.cli.cards.receipt import WORDS, near, seconds
from fasttrain.cli.cards.tuning import BY_PROCESSOR
from fasttrain.cli.console import stdout_console
from fasttrain.model.outcome import State
from fasttrain.model.proof import ProofReport, Speed, Window
from fasttrain.model.tuning import UNBOUNDED

STYLES = {
    "same bits": "green",
    "within rounding": "green",
    "differs": "bold red",
    "can't tell": "yellow",
}
_WORDS = {
    "same bits": "the same losses, bit by bit",
    "within rounding": "the same losses but for rounding",
    "differs": "the losses differ",
    "can't tell": "whether the losses are the same can't be told",
}
_ENDS = {
    "running": "",
    "steps": "",
    "script": "the script ended before",
    "failed": "the script failed",
    "given up": "",
    "interrupted": "",
}


def print_proof(report: ProofReport, run_dir: str) -> None:
    """Print a report to stdout."""
    console = stdout_console()
    head = f"fasttrain: compared {report.steps:,} steps in {seconds(report.wall_s)}"
    console.print(Text(head, style="bold"), soft_wrap=True)
    if report.curves.windows:
        console.print(Padding(_table(report.curves.windows), (0, 0, 0, 2)))
    finding = report.curves.finding
    line = Text("  ").append(_verdict(report), style=STYLES[finding])
    console.print(line.append(f": {report.curves.reason}"), soft_wrap=True)
    for text in _footer(report, run_dir):
        console.print(Text(f"  {text}"), soft_wrap=True)


def _verdict(report: ProofReport) -> str:
    if "chosen" in report.failed and report.curves.finding == "differs":
        return "wrong"
    return _WORDS[report.curves.finding]


def _table(windows: tuple[Window, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("steps", "plain", "chosen", "apart", "rounding"):
        table.add_column(title, no_wrap=True, justify="right")
    for part in windows:
        table.add_row(
            f"{part.first:,}-{part.last:,}" if part.last > part.first else f"{part.first:,}",
            f"{part.plain:.6g}",
            "not finite" if part.chosen is None else f"{part.chosen:.6g}",
            "" if part.apart is None else f"{part.apart:.2g}",
            "" if part.allowed is None else f"{part.allowed:.2g}",
        )
    return table


def _footer(report: ProofReport, run_dir: str) -> Iterator[str]:
    if report.speed is not None:
        yield from _speed(report.speed)
    elif report.steps:
        yield "steps were too few to time any"
    for side, why in report.failed.items():
        yield f"{_SIDES.get(side, side)} failed: {why}"
    for outcome in report.levers:
        if outcome.state not in (State.OFF, State.APPLIED):
            reason = f": {outcome.reason}" if outcome.reason else ""
            yield f"{outcome.lever} {WORDS[outcome.state]}{reason}"
    yield from report.notes
    if end := _ENDS[report.end]:
        yield f"{end}; what there was until then was compared"
    yield f"kept in {near(run_dir)}"


_SIDES = {
    "plain": "the run without levers",
    "chosen": "the run with the levers",
}


def _speed(speed: Speed) -> Iterator[str]:
    ratio, step = (
        speed.ratio,
        f"{seconds(speed.step_s)} a step, {seconds(speed.plain_step_s)} plain",
    )
    if ratio.high >= UNBOUNDED:
        yield f"{step}; {speed.pairs} pairs of blocks are too few to compare"
    else:
        interval = f"x {ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f}, 95 %)"
        yield f"{speed.verdict}: {step}: {interval}, {speed.pairs} pairs of blocks"
        if ratio.leaves_open(speed.verdict):
            yield BY_PROCESSOR.format(verdict=speed.verdict)
    yield (
        f"the first {speed.begun_steps:,} steps took {seconds(speed.begun_s)},"
        f" {seconds(speed.plain_begun_s)} plain{_pays(speed)}"
    )


def _pays(speed: Speed) -> str:
    if speed.pays_after is None:
        return ""
    return f": it pays after {speed.pays_after:,} steps"
