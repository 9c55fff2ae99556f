"""The table of ``--explain``."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from fasttrain.cli.console import stdout_console
from fasttrain.planning.explain import Row


def decision_table(rows: tuple[Row, ...]) -> None:
    """Print every decision with its reason and source to stdout."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("decision", "value", "reason", "source"):
        table.add_column(title, overflow="fold")
    for row in rows:
        # Text, not str: a value with square brackets is no markup.
        table.add_row(*(Text(cell) for cell in (row.topic, row.value, row.reason, row.source)))
    stdout_console(width=160).print(table)
