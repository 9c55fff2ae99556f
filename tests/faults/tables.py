"""Prints what the tests of faults have recorded as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import shorten

WIDTH = 90  # what is longer stands with the test that failed
Record = Sequence[str]  # table, row, column, text


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Give the lines of all tables; texts that a cell has more than once are counted."""
    for table in dict.fromkeys(record[0] for record in records):
        own = sorted(record[1:] for record in records if record[0] == table)
        yield ""
        yield f"{table}: {len(own)} results"
        columns = sorted({column for _, column, _ in own})
        names = dict.fromkeys(row for row, _, _ in own)
        rows = [(row, *(_cell(own, row, column) for column in columns)) for row in names]
        rows.insert(0, ("", *columns))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _cell(records: Sequence[Record], row: str, column: str) -> str:
    found = Counter(
        shorten(text, WIDTH) for at, under, text in records if (at, under) == (row, column)
    )
    return ", ".join(f"{count} {text}" if count > 1 else text for text, count in found.items())
