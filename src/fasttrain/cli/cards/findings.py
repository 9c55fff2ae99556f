"""Findings as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fasttrain.cli.console import stdout_console
from fasttrain.model.examination import Finding, Severity
from fasttrain.planning.explain import Row

STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "hint": "cyan"}


def told(finding: Finding) -> Table:
    """Return a finding's three lines, each hanging below its first word."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    where = f"{finding.where}: " if finding.where else ""
    head = Text(f"{finding.severity}:", style=STYLES[finding.severity])
    table.add_row(head, Text(f"{where}{finding.what}"))
    table.add_row("why:", Text(finding.why))
    fix = Text(finding.fix)
    table.add_row("fix:", fix.append(f"  [{finding.check}]", style="dim"))
    return table


def below(table: Table) -> Group:
    """Return a table with a line before it; rich's own padding would fill that line with blanks."""
    return Group("", table)


def counted_findings(findings: Sequence[Finding]) -> str:
    """Return how many there are of each severity, in words."""
    counts = {s: sum(f.severity == s for f in findings) for s in STYLES}
    parts = [f"{n} {s}{'' if n == 1 else 's'}" for s, n in counts.items() if n]
    return ", ".join(parts) if parts else "nothing is wrong"


# The table of ``--explain``.


def decision_table(rows: tuple[Row, ...]) -> None:
    """Print every decision with its reason and source to stdout."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("decision", "value", "reason", "source"):
        table.add_column(title, overflow="fold")
    for row in rows:
        # Text, not str: a value with square brackets is no markup.
        table.add_row(*(Text(cell) for cell in (row.topic, row.value, row.reason, row.source)))
    stdout_console(width=160).print(table)
