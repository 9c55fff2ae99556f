"""How a whole session of tests is dealt to processes, and what tables it prints in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import shorten

from xdist.scheduler import LoadFileScheduling

WIDTH = 90  # what is longer stands with the test that failed
Record = Sequence[str]  # table, row, column, text


class SlurmTogether(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
    """Deals files to processes, and all that run on SLURM to one: it holds the cluster for them.

    The tests of faults share nothing, and are dealt one by one.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/faults/"):
            return nodeid
        folder = "tests/slurm/"
        return folder if nodeid.startswith(folder) else str(super()._split_scope(nodeid))


def table_lines(records: Sequence[Record]) -> Iterator[str]:
    """Return the lines of all tables; texts that a cell has more than once are counted."""
    for table in dict.fromkeys(record[0] for record in records):
        own = sorted(tuple(record[1:]) for record in records if record[0] == table)
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
