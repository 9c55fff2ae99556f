"""``npu-smi info``: asked once, and its table read in each of its layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fasttrain.hardware.host import Host
from fasttrain.hardware.tool import ToolError, run_tool

# It asks every card in turn and can take seconds on a server with 16 chips.
TIMEOUT_S = 10.0

_HEAD = re.compile(r"(\d+)\s+(\S+)")
_USAGE = re.compile(r"\d+\s*/\s*(\d+)")
_VERSION = re.compile(r"Version:\s*(\S+)")

NO_TABLE = "not the table of npu-smi info"


class NpuSmi:
    """The tool of a machine, asked once for all that want to know.

    Attributes:
        tool: Its path; empty where there is none.
    """

    def __init__(self, host: Host, *, timeout_s: float = TIMEOUT_S) -> None:
        self.tool = host.which("npu-smi", "usr/local/bin", "usr/local/sbin")
        self._timeout_s = timeout_s
        self._answer: str | ToolError | None = None

    def info(self) -> str:
        """Return what ``npu-smi info`` printed when it was first asked.

        Raises:
            ToolError: It failed then, or gave no answer in time.
        """
        if self._answer is None:
            try:
                self._answer = run_tool([self.tool, "info"], timeout_s=self._timeout_s)
            except ToolError as error:
                self._answer = error
        if isinstance(self._answer, ToolError):
            raise self._answer
        return self._answer


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip: its card's NPU id, soc name such as ``Ascend910B3``, health and memory."""

    npu: int
    name: str
    health: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class SmiTable:
    """The tool's own version, and the chips in the order of their logic ids."""

    version: str
    chips: tuple[Chip, ...]


def parse_npu_smi(text: str) -> SmiTable:
    """Read what ``npu-smi info`` printed.

    Every chip has two rows, first its name and health, then its bus and memory. The layouts
    differ in the columns: Atlas A2 shows DDR and HBM, 310P only DDR, A3 and 310P a second id in
    the second row, A5 puts the NPU id into a cell of its own.

    Raises:
        ValueError: The text is no such table, or it is cut off.
    """
    version = _VERSION.search(text)
    if version is None:
        raise ValueError(NO_TABLE)
    rows = _rows(text)
    return SmiTable(version[1], tuple(_chip(head, next(rows, None)) for head in rows))


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the chips' rows as (ids, health or bus, figures), without titles and processes."""
    titles_over = False
    for line in text.splitlines():
        if "Process id" in line:
            return
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|") or len(cells) < 3:
            continue
        ids = " ".join(cells[:-2]).strip()
        titles_over = titles_over or bool(_HEAD.fullmatch(ids))
        if titles_over:
            yield ids, cells[-2], cells[-1]


def _chip(head: tuple[str, str, str], detail: tuple[str, str, str] | None) -> Chip:
    named = _HEAD.fullmatch(head[0])
    totals = [int(total) for total in _USAGE.findall(detail[2])] if detail else []
    if named is None or not totals:
        raise ValueError(f"the rows of NPU {head[0]!r} are cut off or of an unknown layout")
    # DDR comes before HBM; chips with HBM report 0 / 0 DDR, chips without have no HBM column.
    mebibytes = next((total for total in reversed(totals) if total), 0)
    return Chip(int(named[1]), soc_name(named[2]), head[1], mebibytes * 2**20)


def soc_name(name: str) -> str:
    """Return the soc name of a printed chip name: ``Ascend910B3`` for ``910B3``.

    A3 prints a bare ``Ascend910`` for every Ascend910_93xx; first-generation cards print theirs
    without ``Ascend``, so that ``910`` is another chip.
    """
    if name == "Ascend910":
        return "Ascend910_93"
    return name if name.startswith("Ascend") else f"Ascend{name}"
