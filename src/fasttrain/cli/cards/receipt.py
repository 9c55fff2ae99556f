"""The receipt of a run, printed for people."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fasttrain.cli.console import stderr_console
from fasttrain.model.errors import size
from fasttrain.model.outcome import Outcome, RankReport, Receipt, State, StepStats

STYLES = {
    State.OFF: "dim",
    State.SKIPPED: "dim",
    State.CEDED: "cyan",
    State.FAILED: "bold red",
    State.ARMED: "yellow",
    State.APPLIED: "green",
}
# The states as a person reads them, where the record's word would not be understood.
WORDS = {state: state.value for state in State} | {
    State.CEDED: "left to the script",
    State.ARMED: "had no effect",
}
_PLURAL = re.compile(r"(?<=ss|ch)es$|s$")  # losses, batches; graphs
SHOWN_SITES = 4
SHOWN_NOTES = 6


def print_receipt(receipt: Receipt) -> None:
    """Print a receipt to stderr."""
    console = stderr_console()
    head = f"fasttrain: {receipt.command} ended with exit code {receipt.exit_code}"
    head = f"{head} after {seconds(receipt.wall_s)}"
    idle = all(rank.idle for rank in receipt.ranks)
    if idle and receipt.ranks:
        head = f"{head}; no training was seen"
    console.print(Text(head, style="bold"), soft_wrap=True)
    if not idle:
        console.print(Padding(_body(receipt.ranks), (0, 0, 0, 2)))
    for line in _footer(receipt):
        console.print(Text(line), soft_wrap=True)


def _body(ranks: tuple[RankReport, ...]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    first = ranks[0]
    for outcome in first.outcomes:
        state = Text(WORDS[outcome.state], style=STYLES[outcome.state])
        table.add_row(outcome.lever, state, _details(outcome))
    for other in ranks[1:]:
        if difference := _difference(first, other):
            table.add_row(f"rank {other.rank}", "", Text(difference))
    if len(ranks) > 1:
        table.add_row("ranks", "", Text(f"{len(ranks)} reported; rank {first.rank} is shown"))
    table.add_row("speed", "", Text(speed(_of_all(ranks), ranks=len(ranks))))
    return table


def _of_all(ranks: tuple[RankReport, ...]) -> StepStats:
    """Return the figures of the first rank, with the throughput of all ranks together."""
    return replace(
        ranks[0].stats,
        samples_per_s=sum(rank.stats.samples_per_s for rank in ranks),
        tokens_per_s=sum(rank.stats.tokens_per_s for rank in ranks),
    )


def _details(outcome: Outcome) -> Text:
    parts = [outcome.asked if outcome.state is State.APPLIED else "", outcome.reason]
    sites = [f"{site.what} ({site.where})" if site.where else site.what for site in outcome.sites]
    if len(sites) > SHOWN_SITES:
        sites = [*sites[:SHOWN_SITES], f"{len(sites) - SHOWN_SITES} more"]
    if outcome.state is State.APPLIED:
        parts.append(", ".join(sites))
    parts.append(", ".join(counted(name, n) for name, n in outcome.counts.items() if n))
    text = Text(": ".join(part for part in parts if part))
    for note in outcome.notes[:SHOWN_NOTES]:
        text.append(f"\n- {note}", style="dim")
    if len(outcome.notes) > SHOWN_NOTES:
        text.append(f"\n- {len(outcome.notes) - SHOWN_NOTES} more in receipt.json", style="dim")
    return text


def counted(name: str, count: int) -> str:
    """Return ``1 graph`` or ``2 graphs``, given a name in the plural."""
    return f"{count:,} {name if count != 1 else _PLURAL.sub('', name)}"


def _difference(first: RankReport, other: RankReport) -> str:
    states = {outcome.lever: outcome.state for outcome in first.outcomes}
    changed = [
        f"{outcome.lever} {WORDS[outcome.state]}: {outcome.reason}"
        for outcome in other.outcomes
        if states.get(outcome.lever) is not outcome.state
    ]
    return "; ".join(changed)


def speed(stats: StepStats, *, ranks: int = 1) -> str:
    """Return the figures of a run in one line, without unknown ones."""
    if not stats.steps:
        return f"no optimizer step was seen; peak memory {size(stats.peak_memory_bytes)}"
    noun, plural = ("backward pass", "backward passes") if stats.are_passes else ("step", "steps")
    parts = [f"{stats.steps:,} {noun if stats.steps == 1 else plural}"]
    if stats.resumed_from:
        parts.append(f"{stats.resumed_from:,} of them before the snapshot")
    if stats.reported_until:
        parts.append(f"all other figures and counts until step {stats.reported_until:,}")
    if stats.median_step_s:
        parts.append(f"median {seconds(stats.median_step_s)}, p95 {seconds(stats.p95_step_s)}")
    if stats.samples_per_s:
        tokens = f" ({stats.tokens_per_s:,.0f} tokens/s)" if stats.tokens_per_s else ""
        of = f" on {ranks} ranks" if ranks > 1 else ""
        parts.append(f"{stats.samples_per_s:,.0f} samples/s{tokens}{of}")
    if stats.first_step_s:
        parts.append(f"first step after {seconds(stats.first_step_s)}")
    if stats.compile_s:
        parts.append(f"compile {seconds(stats.compile_s)}")
    parts.append(f"peak memory {size(stats.peak_memory_bytes)}")
    return ", ".join(parts)


def seconds(value: float) -> str:
    """Return a duration with three digits: ``812 us``, ``12.3 ms``, ``41.2 s``, ``1 h 02 min``."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if value < limit:
            return f"{_digits(value * factor)} {unit}"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 99.5 else f"{value:.0f}"


def _footer(receipt: Receipt) -> list[str]:
    from fasttrain.launch.attempts import earlier

    attempts = () if receipt.crash else receipt.attempts  # the crash's card lists them
    return [
        *([f"  restarted: {earlier(attempts)}"] if attempts else ()),
        *(f"  warning: {text}" for text in (*receipt.unmet, *receipt.warnings)),
        *(f"  hint: {text}" for text in receipt.hints),
        f"  kept in {near(receipt.run_dir)}",
    ]


def near(path: str) -> str:
    """Return a path, relative to the working directory if it is inside."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the script may have removed it
        return path
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
